"""Gain of a draft model in virtual time, in which every step takes what steps of Qwen3-32B and Qwen3-0.6B take on an H200.

No model runs. The engine schedules, plans draft tokens and learns costs as it does on a GPU; which are accepted is chance.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from nf4_kernels.timing import KernelTimes
from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.limits import ModelLimits
from server.engine.runtime.memory import MemoryGauge
from server.engine.runtime.runner import ModelRunner
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.runtime.sampling.verification import verified
from server.engine.scheduling.sequence import Sequence
from server.engine.scheduling.step import Step, UnreadDrafts
from server.engine.speculation.costs import StepCosts
from tests.engine.factories import make_request

# Milliseconds by tokens: as the start measures them with short contexts, and those of the device while it serves.
PLAIN, SERVING = {1: 5.95, 2: 6.02, 4: 6.02, 8: 6.32}, {1: 6.15, 2: 6.2, 4: 6.3, 8: 6.6}
VERIFYING = {2: 6.79, 4: 6.79, 8: 7.1, 16: 8.91, 32: 9.99, 64: 12.51}
VERIFIED = {2: 6.35, 4: 6.4, 8: 6.8, 16: 8.5, 32: 9.6, 64: 12.2}
DRAFTING = {1: 0.76, 2: 0.78, 4: 0.82, 8: 0.84}
FOLLOWING_MS, READING_MS, LAUNCHING_MS, NEXT_MS = 8.0, 0.15, 0.3, 0.35
"""The host's part: catching up with a prompt, reading a step, launching one and a draft token, and each further one."""
TOKENS = 400


class Machine:
    """The host's clock, and when its device has done all that was launched; in milliseconds."""

    def __init__(self, right: float) -> None:
        self.now = self.free = 0.0
        self._chance, self._right = random.Random(7), right

    def launch(self, host: float, device: float) -> float:
        """Launch something; when it ends on the device."""
        self.now += host
        # Other work delays some steps.
        self.free = max(self.free, self.now) + device * self._chance.uniform(1.0, 1.05)
        return self.free

    def token(self, draft: int) -> int:
        """The token where `draft` was proposed: it, or another one."""
        return draft if self._chance.random() < self._right else draft + 1


@dataclass(frozen=True)
class Launched:
    """A step on the device; see AsyncStep."""

    machine: Machine
    step: Step
    results: list[Sampled]
    ends: float

    def complete(self) -> bool:
        return True

    def read(self) -> list[Sampled]:
        self.machine.now = max(self.machine.now, self.ends) + READING_MS
        return verified(self.step, self.results)


class VirtualDraftModel:
    """Proposes token 5 at all places; see DraftModel."""

    longest = 10**6

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def follow(self, parts: Items[tuple[Sequence, int, int]]) -> bool:
        self._machine.launch(FOLLOWING_MS, FOLLOWING_MS / 2)
        return True

    def propose(self, asked: Items[tuple[Sequence, int, int]]) -> UnreadDrafts:
        counts = [count for *_, count in asked]
        deepest = max(counts)
        self._machine.launch(
            LAUNCHING_MS, sum(_at(DRAFTING, sum(c > place for c in counts)) for place in range(deepest))
        )
        self._machine.now += NEXT_MS * (deepest - 1)
        return Mock(read=lambda: {sequence.request_id: [5] * count for sequence, _, count in asked})


class VirtualRunner:
    """Does what the engine asks of a ModelRunner on a GPU, without a model."""

    adapters = tower = states = None
    nf4_weight_bytes = graph_replays = 0
    device = torch.device("cpu")
    limits = ModelLimits(2000, 8 * 125, 1000, (), 8)

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.memory = MemoryGauge(self.device)
        self.draft_model = VirtualDraftModel(machine)
        self.step_costs = StepCosts(*(_seconds(times) for times in (VERIFYING, PLAIN, DRAFTING)))

    def kernel_times(self) -> KernelTimes:
        return KernelTimes()

    def execute(self, step: Step) -> list[Sampled]:
        self._machine.now = self._machine.launch(0.0, 0.2 * step.num_tokens)
        return [Sampled(5) for _ in step.sampled]

    def execute_async(self, step: Step, _previous: Launched | None) -> Launched | None:
        if not all(chunk.is_decode for chunk in step.chunks):
            return None
        step.read_drafts()
        ends = self._machine.launch(LAUNCHING_MS, _at(VERIFIED if step.drafts else SERVING, step.num_tokens))
        results = []
        for chunk in step.chunks:
            results += [Sampled(self._machine.token(token)) for token in chunk.draft_tokens] + [Sampled(5)]
        return Launched(self._machine, step, results, ends)


def _at(times: dict[int, float], tokens: int) -> float:
    return times[min(size for size in times if size >= tokens)]


def _seconds(times: dict[int, float]) -> dict[int, float]:
    return {size: own * 1e-3 for size, own in times.items()}


def _decoded(engine: Engine, machine: Machine, sequences: int, number: int) -> float:
    """Tokens per millisecond while all of some sequences decode, from their 16th token on."""
    counts = {f"{number}-{index}": 0 for index in range(sequences)}
    for name in counts:
        engine.add(make_request(100, name, max_tokens=TOKENS, ignore_eos=True))
    begun, before = 0.0, 0
    while True:
        outputs = engine.step().outputs
        for output in outputs:
            assert output.error is None
            counts[output.request_id] += len(output.new_token_ids)
        if any(output.finish_reason is not None for output in outputs):
            engine.abort(list(counts))
            return (sum(counts.values()) - before) / (machine.now - begun)
        if not begun and min(counts.values()) >= 16:
            begun, before = machine.now, sum(counts.values())


@pytest.mark.parametrize(
    ("sequences", "right", "least", "most"),
    [
        (1, 0.0, 0.98, 1.0),
        (8, 0.0, 0.99, 1.0),
        (1, 0.6, 1.4, 1.6),
        (8, 0.6, 1.08, 1.2),
        (8, 0.8, 1.5, 1.65),
    ],
)
def test_gains(sequences: int, right: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(right)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now * 1e-3)
    runner = VirtualRunner(machine)
    options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "enable_prefix_caching": False}
    off, on = (
        Engine(cast(ModelRunner, runner), EngineConfig(speculation=way, draft_model=draft, **options))
        for way, draft in (("off", None), ("draft", "-"))
    )
    rounds = 1 if sequences == 8 else 4
    plain = _decoded(off, machine, sequences, 0)
    drafted = [_decoded(on, machine, sequences, 1 + number) for number in range(3 * rounds)]
    ratio = statistics.mean(drafted) / plain
    assert least <= ratio <= most, [own / plain for own in drafted]


class LookupRunner(VirtualRunner):
    """Gives a text of few different tokens, whose repetitions seldom go on as lookup has it."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        chance = random.Random(3)
        self.text = [chance.randrange(3, 9) for _ in range(1000)]
        self.step_costs = StepCosts(_seconds(VERIFYING), _seconds(PLAIN))
        self.void = 0
        """Steps without draft tokens that waited for the tokens of others without."""
        self._behind_plain = False

    def execute_async(self, step: Step, previous: Launched | None) -> Launched | None:
        self.void += previous is None and self._behind_plain and not step.drafts
        self._behind_plain = all(chunk.is_decode for chunk in step.chunks) and not step.drafts
        launched = super().execute_async(step, previous)
        # Tokens that are not known yet will be by the time that these are read.
        places = [len(chunk.sequence.tokens) + place for chunk in step.chunks for place in range(chunk.num_sampled)]
        found = [Sampled(self.text[place]) for place in places]
        return None if launched is None else replace(launched, results=found)


def test_what_draft_tokens_delay_is_no_cost_of_a_step_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now * 1e-3)
    runner = LookupRunner(machine)
    engine = Engine(cast(ModelRunner, runner), EngineConfig(speculation="lookup", device="cpu", max_num_seqs=8))
    noted: list[tuple[float, bool]] = []
    note = runner.step_costs.note
    monkeypatch.setattr(
        runner.step_costs,
        "note",
        lambda n, seconds, drafted: noted.append((seconds, drafted)) or note(n, seconds, drafted),
    )
    _decoded(engine, machine, 1, 0)
    plain, checks = ([seconds for seconds, drafted in noted if drafted == way] for way in (False, True))
    assert len(plain) > 100
    assert len(checks) > 10
    # A step that is not launched ahead takes LAUNCHING_MS more.
    assert max(plain) < 1e-3 * (SERVING[1] * 1.05 + READING_MS + 0.01)
    assert runner.void >= 3
