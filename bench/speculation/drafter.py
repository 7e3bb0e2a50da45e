"""Costs of steps with draft tokens on a GPU, and their gain with a given accuracy; with dummy NF4 weights.

python -m bench.speculation.drafter --model qwen3-32b --draft qwen3-0.6b
python -m bench.speculation.drafter --model qwen3-32b

It measures, for one model: steps of one sequence with 0, 3, 7 and 15 draft tokens, none of which is right; tokens per second
with a drafter whose tokens are each right with a probability; and tokens per second of random text, in which nothing comes
true, with speculation by lookup, by the draft model and off. With --draft that drafter is a draft model: its time is in the
figures, and how many draft tokens there are is learned from how many are right. Without it they cost nothing, and how many
there are follows from the probability. Which of a drafter's tokens are accepted is decided at random and not by
comparison, because models with dummy weights have near ties and agree on nothing. Decode is timed while all sequences run,
and what is compared is interleaved. The rows go to bench/results/speculation-<device>.json.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from bench.speculation.results import Row, default_path, write
from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.runner import ModelRunner
from server.engine.runtime.sampling import verification
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.scheduling.step import Drafts, Step
from server.engine.speculation.costs import StepCosts
from server.engine.speculation.drafts import DraftSpeculator
from server.engine.speculation.lookup import LookupProposer
from server.engine.start import load_runner
from server.engine.supervisor.child import ENVIRONMENT
from server.types import EngineStats, GenerateRequest, SamplingParams

MODELS = Path(__file__).parents[1] / "models"
ROUNDS = 3
VOCABULARY = 30_000
PROMPT = 128
"""Tokens of a prompt, but for the steps behind longer contexts."""
_numbers = itertools.count()
_chance = random.Random(0)


class Drafter(LookupProposer):
    """Proposes tokens each of which is taken to be accepted with one probability."""

    def __init__(self, right: float) -> None:
        super().__init__(0)
        self._right = right

    def survival(self, count: int) -> list[float]:
        return [self._right ** (place + 1) for place in range(count)]

    def promise(self, unknown: int, count: int) -> float:
        return sum(self.survival(unknown + count)[unknown:])

    def propose(self, count: int) -> list[int]:
        return list(range(5, 5 + count))


def _drawn(right: float, draft_tokens: Items[int], _results: list[Sampled]) -> int:
    """Do as verification.num_accepted() does, but by chance: each token behind accepted ones is with that probability."""
    wrong = (place for place in range(len(draft_tokens)) if _chance.random() >= right)
    return next(wrong, len(draft_tokens))


@contextmanager
def drafting(engine: Engine, right: float, count: int | None = None) -> Iterator[None]:
    """Let an engine's sequences have a Drafter while entered; with a count, one sequence has that many in every step."""
    speculator = engine._speculator
    assert speculator is not None
    if isinstance(speculator, DraftSpeculator):
        with patch.object(verification, "num_accepted", partial(_drawn, right)):
            yield
        return
    costs, plan = speculator.costs, speculator.plan
    if count is not None:
        speculator.costs = StepCosts({1 + count: 1e-9}, {1: 1.0})

    def planned(step: Step) -> Drafts:
        for chunk in step.chunks:
            speculator.proposers.setdefault(chunk.sequence, Drafter(right))
        return plan(step)

    with patch.object(speculator, "plan", planned), patch.object(verification, "num_accepted", partial(_drawn, right)):
        yield
    speculator.costs = costs


def run(engine: Engine, prompts: list[list[int]], tokens: int, temperature: float = 0.0) -> tuple[float, float]:
    """Tokens per second of decode while all sequences run, and the median seconds of its steps."""
    counts: dict[str, int] = {}
    for prompt in prompts:
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=len(counts), ignore_eos=True)
        request = GenerateRequest(str(next(_numbers)), prompt, params)
        counts[request.request_id] = 0
        engine.add(request)
    steps: list[float] = []
    started, counted, seconds, ended = 0.0, 0, 0.0, False
    while engine.has_work:
        now = time.perf_counter()
        for output in engine.step().outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            counts[output.request_id] += len(output.new_token_ids)
            ended |= output.finish_reason is not None
        if started:
            steps.append(time.perf_counter() - now)
        elif min(counts.values()) >= 4:
            started, counted = time.perf_counter(), sum(counts.values())
        if ended and not seconds:
            seconds, counted = time.perf_counter() - started, sum(counts.values()) - counted
            engine.abort(list(counts))
    return counted / seconds, statistics.median(steps)


def random_prompts(count: int, length: int) -> list[list[int]]:
    """Prompts of random tokens."""
    return [[_chance.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(count)]


def step_times(off: Engine, on: Engine, contexts: list[int], model: str) -> list[Row]:
    """Print the seconds of steps of one sequence by its draft tokens, and give a row for each number of them."""
    rows = []
    for context in contexts:
        prompts = random_prompts(1, context)
        found: dict[int, list[float]] = {count: [] for count in (0, 3, 7, 15)}
        for _ in range(ROUNDS):
            found[0].append(run(off, prompts, 100)[1])
            for count in (3, 7, 15):
                with drafting(on, 0.0, count):
                    found[count].append(run(on, prompts, 100)[1])
        medians = {count: statistics.median(own) for count, own in found.items()}
        shown = (
            f"{count} draft tokens {1e3 * own:.3f} ms ({own / medians[0]:.3f} x)" for count, own in medians.items()
        )
        print(f"context {context}: {', '.join(shown)}", flush=True)
        for count in (3, 7, 15):
            ratio = statistics.median(plain / own for plain, own in zip(found[0], found[count], strict=True))
            speeds = round(1 / medians[count], 1), round(1 / medians[0], 1), round(ratio, 3)
            task = f"{count} draft tokens behind {context} tokens, none right"
            rows.append(Row(model, "free drafter", task, 1, count, 0.0, *speeds))
    return rows


def drafted(off: Engine, on: Engine, batches: list[int], model: str, method: str) -> list[Row]:
    """Print what a drafter gains, for each share of right draft tokens."""
    rows = []
    for batch, right in itertools.product(batches, (0.6, 0.7, 0.8)):
        prompts, pairs, before = random_prompts(batch, PROMPT), [], on.stats()
        for _ in range(ROUNDS):
            plain = run(off, prompts, 200)[0]
            with drafting(on, right):
                # How many draft tokens are right is chance, which few tokens would leave to decide.
                pairs.append((run(on, prompts, 200 if batch > 1 else 800)[0], plain))
        rows.append(_row(model, method, f"{right} of draft tokens right", batch, pairs, before, on.stats()))
    return rows


def nothing_comes_true(off: Engine, on: dict[str, Engine], batches: list[int], model: str) -> list[Row]:
    """Print how much slower random text is, on which no draft token is right; on: by method."""
    rows = []
    for batch in batches:
        prompts, before = random_prompts(batch, PROMPT), {method: engine.stats() for method, engine in on.items()}
        pairs: dict[str, list[tuple[float, float]]] = {method: [] for method in on}
        for number in range(ROUNDS + 1):
            # The engine that runs first changes from round to round.
            order = [off, *on.values()][:: -1 if number % 2 else 1]
            speeds = {engine: run(engine, prompts, 120, temperature=1.0)[0] for engine in order}
            for method, engine in on.items():
                pairs[method].append((speeds[engine], speeds[off]))
        for method, engine in on.items():
            rows.append(_row(model, method, "random text", batch, pairs[method], before[method], engine.stats()))
    return rows


def _row(
    model: str,
    method: str,
    task: str,
    batch: int,
    pairs: list[tuple[float, float]],
    before: EngineStats,
    after: EngineStats,
) -> Row:
    """Print and give a row; pairs: tokens per second with speculation and without, of each round."""
    checked, drafts = after.draft_tokens - before.draft_tokens, after.drafts - before.drafts
    right = sum(after.accepted_by_place) - sum(before.accepted_by_place)
    row = Row(
        model,
        method,
        task,
        batch,
        round(checked / drafts, 2) if drafts else 0.0,
        round(right / checked, 3) if checked else 0.0,
        round(statistics.median(on for on, _ in pairs), 1),
        round(statistics.median(off for _, off in pairs), 1),
        round(statistics.median(on / off for on, off in pairs), 3),
    )
    ratios = [on / off for on, off in pairs]
    print(
        f"{method}, {task}, batch {batch}: {row.tok_s} tokens/s, {row.off_tok_s} without, {row.ratio:.3f} x"
        f" ({min(ratios):.3f} to {max(ratios):.3f}), {row.draft_tokens} draft tokens, {row.accept_rate} right",
        flush=True,
    )
    return row


def _engines(runner: ModelRunner, config: EngineConfig) -> dict[str, Engine]:
    """Make an engine for each way of speculation, all on one model; they never run at the same time."""
    methods = ("off", "lookup") if runner.draft_model is None else ("off", "lookup", "draft")
    engines = {method: Engine(runner, config.model_copy(update={"speculation": method})) for method in methods}
    costs, speculator = copy.deepcopy(runner.step_costs), engines["lookup"]._speculator
    assert costs is not None
    assert speculator is not None
    # Both learn from the steps that they take, and only a draft model's tokens take time.
    costs._drafting = None
    speculator.costs = costs
    return engines


def _numbers_of(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> int:
    """Measure one model, print and write the rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.speculation.drafter", description=__doc__)
    parser.add_argument("--model", default="qwen3-32b", help="a folder of bench/models")
    parser.add_argument("--draft", help="the draft model, a folder of bench/models")
    parser.add_argument("--contexts", type=_numbers_of, default=[500, 4000])
    parser.add_argument("--batches", type=_numbers_of, default=[1, 8], help="batches with draft tokens")
    parser.add_argument("--random", type=_numbers_of, default=[1, 8, 32, 128], help="batches of random text")
    parser.add_argument("--kv-gib", type=int, default=24)
    parser.add_argument("--out", type=Path, help="default: bench/results/speculation-<device>.json")
    asked = parser.parse_args()
    if ENVIRONMENT.keys() - os.environ:
        # As in bench.e2e: C libraries and torch read these variables when they are loaded.
        command = [sys.executable, "-m", "bench.speculation.drafter", *sys.argv[1:]]
        os.execve(sys.executable, command, {**ENVIRONMENT, **os.environ})
    config = EngineConfig(
        device="cuda", load_format="dummy", speculation="draft" if asked.draft else "lookup", enable_prefix_caching=False,
        draft_model=str(MODELS / asked.draft) if asked.draft else None, max_model_len=8448,
        max_num_seqs=max(asked.batches + asked.random), kv_cache_bytes=asked.kv_gib * 2**30,
    )  # fmt: skip
    begun = time.perf_counter()
    runner = load_runner(MODELS / asked.model, config, lambda *_: None)
    ready = time.perf_counter() - begun
    print(f"{asked.model} on {torch.cuda.get_device_name()}, ready in {ready:.0f} s; {runner.step_costs}", flush=True)
    engines = _engines(runner, config)
    off, lookup, draft = engines["off"], engines["lookup"], engines.get("draft")
    run(off, random_prompts(1, PROMPT), 50)
    rows = step_times(off, lookup, asked.contexts, asked.model)
    by = f"draft by {asked.draft}"
    if draft is None:
        rows += drafted(off, lookup, asked.batches, asked.model, "free drafter")
    else:
        rows += drafted(off, draft, asked.batches, asked.model, by)
    on = {"lookup": lookup} if draft is None else {"lookup": lookup, by: draft}
    write(path := asked.out or default_path(True), rows, True, rounds=ROUNDS)
    rows = nothing_comes_true(off, on, asked.random, asked.model)
    write(path, rows, True, rounds=ROUNDS + 1)
    print(f"{path}, after {time.perf_counter() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
