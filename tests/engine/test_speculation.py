"""Speculation changes no answer: random requests with all options mixed, cancels and preemptions, on and off.

The slow tests have 500 requests for each source of guesses, or SPECULATION_REQUESTS (`make test-speculation`).
"""

from __future__ import annotations

import copy
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from peft import PeftModel

from server.config import EngineConfig, LoraModule
from server.engine.core import Engine
from server.engine.grammar import Grammars
from server.engine.runtime.graphs.options_step import LaunchedStep
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.runner import ModelRunner
from server.engine.runtime.sampling.inverse_cdf import uniform
from server.engine.runtime.sampling.sampler import Sampled, is_sampled_from_raw_logits
from server.engine.scheduling.step import Step
from server.engine.speculation.costs import StepCosts
from server.types import GenerateRequest, RequestOutput, SamplingParams, TokenLogprob
from tests.adapters import ALL_PROJECTIONS, save_adapter
from tests.engine.factories import fix_costs, make_request, run_together, tokens
from tests.engine.models import tiny_model
from tests.engine.test_async_scheduling import AsyncRunner

# Requests of each of the three kinds of engines.
FEW, MANY = 20, int(os.environ.get("SPECULATION_REQUESTS", "500")) // 3
METHODS: dict[str, dict[str, Any]] = {
    "lookup": {"speculation": "lookup"},
    "shared": {"speculation": "lookup", "speculation_shared_store": 2**20},
    "draft": {"speculation": "draft"},
}
WAVE = 20
# That of the embedded model, whose tokenizer the grammars need.
VOCABULARY = 49152
# Guesses cost nearly nothing, so there are many, and many wrong ones.
CHEAP = StepCosts({size: 1 + size / 1000 for size in range(1, 17)})
# Guesses are worth it where they are likely right: steps with guesses and without take turns.
DEAR = StepCosts({size: 1 + size / 6 for size in range(1, 17)})
DEAR_DRAFTS = StepCosts({size: 1 + size / 6 for size in range(1, 17)}, drafting={1: 0.1, 2: 0.25, 6: 0.38})
GRAMMAR = '{"grammars": [{"lark_grammar": "start: /[a-c ]{4,40}/"}]}'
BYTES_PER_TOKEN = 768


@dataclass(frozen=True)
class ReadLater:
    """Stands for a step with guesses that has been launched."""

    step: Step
    results: list[Sampled]

    def complete(self) -> bool:
        return True

    def read(self) -> list[Sampled]:
        return self.results


class LaunchingRunner(AsyncRunner):
    """Launches steps of raw logits, with guesses and without, and executes others, as a GPU's runner does."""

    launched_guesses = 0

    def execute_async(self, step: Step, previous: LaunchedStep | None) -> LaunchedStep | None:
        plain = all(is_sampled_from_raw_logits(chunk.sequence) for chunk in step.chunks)
        return super().execute_async(step, previous) if plain else None

    def launch_check(self, step: Step) -> LaunchedStep | None:
        if not all(is_sampled_from_raw_logits(chunk.sequence) for chunk in step.chunks):
            return None
        self.launched_guesses += 1
        # As on a GPU, what happens until the tokens are read changes nothing that the step computes.
        return cast(LaunchedStep, ReadLater(step, self.execute(step)))

    def execute(self, step: Step) -> list[Sampled]:
        sampler, self._sampler = self._sampler, None
        try:
            return super().execute(step)
        finally:
            self._sampler = sampler


def repeating_model(**sizes: Any) -> Any:
    """A model that says few tokens, most of them because of the one before: its answers often repeat themselves.

    Were all tokens nearly alike to it, rounding would choose among neighbours at a temperature.
    """
    made = tiny_model("llama", **sizes, vocab_size=VOCABULARY)
    made.lm_head.weight[:24] *= 8
    made.lm_head.weight[24:] *= 0.05
    made.lm_head.weight[2] *= 0.5
    for layer in made.model.layers:
        layer.self_attn.o_proj.weight *= 0.05
    return made


@pytest.fixture(scope="module")
def model() -> Any:
    return repeating_model()


@pytest.fixture(scope="module")
def adapter(model: Any, tmp_path_factory: pytest.TempPathFactory) -> LoraModule:
    folder = tmp_path_factory.mktemp("adapters") / "a"
    save_adapter(model, folder, 0, 0.3, r=4, target_modules=ALL_PROJECTIONS)
    return LoraModule(name="a", path=folder)


def draft_model(model: Any) -> Any:
    """A model that mostly agrees with another one."""
    made = copy.deepcopy(model)
    torch.manual_seed(7)
    for layer in made.model.layers:
        layer.self_attn.o_proj.weight += 0.002 * torch.randn_like(layer.self_attn.o_proj.weight)
    made.lm_head.weight[:24] += 0.03 * torch.randn_like(made.lm_head.weight[:24])
    return made


def make_engine(
    model: Any,
    adapter: LoraModule,
    folder: Path,
    kind: type[ModelRunner] = ModelRunner,
    blocks: int = 240,
    **changes: Any,
) -> Engine:
    drafts = changes.get("speculation") == "draft"
    config = EngineConfig(
        device="cpu", block_size=4, max_num_batched_tokens=40, max_num_seqs=6, max_model_len=160, enforce_eager=True,
        lora_modules=(adapter,),
    ).model_copy(update={"kv_cache_bytes": (1 + drafts) * BYTES_PER_TOKEN * 4 * blocks, **changes})  # fmt: skip
    runner = build_runner(copy.deepcopy(model), config, draft=draft_model(model) if drafts else None)
    if kind is not ModelRunner:
        kept = {name: getattr(runner, name) for name in ("step_costs", "adapters", "draft_model")}
        runner = kind(runner._paged, runner.limits)
        for name, value in kept.items():
            setattr(runner, name, value)
    engine = Engine(runner, config, Grammars(folder, VOCABULARY, 2))
    if engine._speculator is not None:
        fix_costs(engine, CHEAP if kind is ModelRunner else DEAR_DRAFTS if drafts else DEAR)
    return engine


def some_prompt(chance: random.Random, others: list[list[int]]) -> list[int]:
    """A text that repeats parts of itself, sometimes behind one that has been computed before."""
    prompt = list(chance.choice(others)[: chance.randint(1, 60)]) if others and chance.random() < 0.5 else []
    part = [chance.randrange(3, 200) for _ in range(chance.randint(2, 12))]
    for _ in range(chance.randint(1, 4)):
        prompt += part[: chance.randint(1, len(part))]
    return prompt[:90]


def some_options(chance: random.Random) -> dict[str, Any]:
    """Options of a request; about half of them are such that guesses come true."""
    options: dict[str, Any] = {
        "max_tokens": chance.choice([1, 2, 15, 40, 60]),
        "temperature": chance.choice([0.0, 0.0, 0.0, 0.2, 0.5, 0.7]),
        "seed": chance.randrange(2**31),
        "ignore_eos": chance.random() < 0.7,
    }
    rarely: dict[str, Any] = {
        "top_p": chance.choice([0.3, 0.9]),
        "top_k": chance.choice([1, 5]),
        "min_p": 0.1,
        "presence_penalty": 0.7,
        "frequency_penalty": -0.4,
        "repetition_penalty": 1.2,
        "logit_bias": {chance.randrange(200): chance.choice([-5.0, 8.0]), 2: 3.0},
        "min_tokens": chance.randint(0, options["max_tokens"]),
        "stop_token_ids": tuple(chance.randrange(200) for _ in range(6)),
        "logprobs": chance.randint(0, 3),
        "prompt_logprobs": 1,
        "grammar": GRAMMAR,
        "speculation": False,
    }
    return options | {name: value for name, value in rarely.items() if chance.random() < 0.12}


def some_requests(chance: random.Random, wave: int, others: list[list[int]]) -> list[GenerateRequest]:
    found = []
    while len(found) < WAVE:
        name, prompt, options = f"w{wave}-{len(found)}", some_prompt(chance, others), some_options(chance)
        adapter = "a" if chance.random() < 0.2 else None
        # Answers of one prompt that run beside each other, as those of n > 1 do.
        for i in range(min(chance.choice([1, 1, 1, 3]), WAVE - len(found))):
            sampling = SamplingParams(**{**options, "seed": options["seed"] + i})
            found.append(GenerateRequest(f"{name}-{i}", prompt, sampling, adapter))
    return found


def sampled_on_a_gpu(request: GenerateRequest) -> GenerateRequest:
    """The request with only those options with which a GPU's graph samples."""
    names = ("max_tokens", "temperature", "seed", "ignore_eos", "top_p", "top_k", "stop_token_ids", "speculation")
    given: dict[str, Any] = {name: getattr(request.sampling, name) for name in names}
    return msgspec.structs.replace(request, sampling=SamplingParams(**given))


def run_wave(
    engine: Engine, requests: list[GenerateRequest], chance: random.Random | None
) -> tuple[dict[str, list[RequestOutput]], set[str]]:
    """All outputs, and the requests that were cancelled; with chance they come one after another and some are cancelled."""
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    waiting, cancelled = list(requests), set[str]()
    while waiting or engine.has_work:
        while waiting and (chance is None or chance.random() < 0.4):
            engine.add(waiting.pop(0))
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
        if chance is not None and chance.random() < 0.03:
            cancelled.add(victim := chance.choice(requests).request_id)
            engine.abort([victim])
            waiting = [request for request in waiting if request.request_id != victim]
    return outputs, cancelled


def close(one: list[TokenLogprob] | None, other: list[TokenLogprob] | None) -> bool:
    if one is None or other is None:
        return one is other
    return [o.token_id for o in one] == [o.token_id for o in other] and all(
        abs(a.logprob - b.logprob) < 1e-3 and len(a.top) == len(b.top) for a, b in zip(one, other, strict=True)
    )


def joined(outputs: list[RequestOutput]) -> RequestOutput:
    whole = outputs[0]
    for output in outputs[1:]:
        assert whole.finish_reason is None
        whole = whole.followed_by(output)
    return whole


@torch.inference_mode()
def is_at_a_boundary(
    model: Any, adapter: LoraModule, request: GenerateRequest, one: list[int], other: list[int]
) -> bool:
    """Whether two answers part where the uniform number is as near to the boundary of both tokens as float32's rounding.

    Of requests with a temperature and no filters, whose distribution is found here in float64.
    """
    sampling = request.sampling
    place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    filtered = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0 or sampling.grammar is not None
    if place is None or filtered or not sampling.temperature:
        return False
    answer, ids = torch.tensor(one[:place], dtype=torch.int64), request.prompt_token_ids + one[:place]
    exact = copy.deepcopy(model)
    if request.adapter is not None:
        exact = PeftModel.from_pretrained(exact, adapter.path)
    logits = exact.double()(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].clone()
    had, counts = torch.tensor(ids).unique(), torch.bincount(answer, minlength=len(logits))
    by = sampling.repetition_penalty
    logits[had] = torch.where(logits[had] < 0, logits[had] * by, logits[had] / by)
    logits -= sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if place < sampling.min_tokens:
        ends = [*sampling.stop_token_ids, *([] if sampling.ignore_eos else [model.config.eos_token_id])]
        logits[ends] = -torch.inf
    below = torch.softmax(logits / sampling.temperature, -1).cumsum(0)
    lower, upper = sorted((one[place], other[place]))
    assert sampling.seed is not None
    distance = abs(below[lower].item() - uniform(sampling.seed, len(ids)))
    return upper == lower + 1 and distance < 1e-6


# 41 blocks hold two or so of the sequences, so many are preempted.
KINDS: dict[str, tuple[type[ModelRunner], int]] = {
    "wide": (ModelRunner, 240), "tight": (ModelRunner, 41), "async": (LaunchingRunner, 41),
}  # fmt: skip
LONG = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.mark.parametrize(
    ("kind", "method", "count"),
    [
        *((kind, method, FEW) for kind in KINDS for method in METHODS if method != "shared" or kind == "async"),
        *(pytest.param(kind, method, MANY, marks=LONG) for kind in KINDS for method in METHODS),
    ],
)
def test_answers_are_the_same_with_and_without(
    kind: str, method: str, count: int, model: Any, adapter: LoraModule, embedded_folder: Path
) -> None:
    runner_type, blocks = KINDS[kind]
    chance = random.Random(f"{runner_type.__name__} {blocks}")
    plain = make_engine(model, adapter, embedded_folder)
    guessing = make_engine(model, adapter, embedded_folder, runner_type, blocks, **METHODS[method])
    others: list[list[int]] = []
    checked = 0
    for wave in range(-(-count // WAVE)):
        requests = some_requests(chance, wave, others)
        expected, _ = run_wave(plain, requests, None)
        got, cancelled = run_wave(guessing, requests, chance)
        for request in requests:
            name = request.request_id
            wanted = joined(expected[name])
            assert wanted.finish_reason in ("stop", "length"), wanted.error
            others.append(request.prompt_token_ids + wanted.new_token_ids)
            if name in cancelled and not (got[name] and got[name][-1].finish_reason):
                begun = tokens(got[name])
                assert begun == wanted.new_token_ids[: len(begun)], request
                continue
            found = joined(got[name])
            if is_at_a_boundary(model, adapter, request, found.new_token_ids, wanted.new_token_ids):
                print(f"{name}: another token at a boundary of the distribution: {request}")
                continue
            assert found.new_token_ids == wanted.new_token_ids, request
            assert (found.finish_reason, found.stop_token_id) == (wanted.finish_reason, wanted.stop_token_id), request
            assert close(found.logprobs, wanted.logprobs), request
            assert close(found.prompt_logprobs, wanted.prompt_logprobs), request
            checked += 1
        assert guessing.stats().kv_blocks_used == 0
    stats = guessing.stats()
    assert checked > 0.7 * count
    assert sum(stats.accepted_by_place) > (count // 4 if (kind, method) == ("async", "draft") else count)
    assert (stats.shared_store_bytes or 0) > 0 or method != "shared"
    assert stats.draft_tokens > sum(stats.accepted_by_place)
    assert (stats.preemptions > 0) == (blocks < 240)
    runner = guessing._runner
    if isinstance(runner, LaunchingRunner):
        assert runner.launched + runner.launched_guesses > count // 2
        assert runner.launched_guesses > count // 10


@pytest.mark.parametrize("method", ["lookup", "draft"])
def test_steps_with_guesses_that_are_read_after_the_next_message(
    method: str, model: Any, adapter: LoraModule, embedded_folder: Path
) -> None:
    """As on a GPU a step with guesses is launched, and requests come and go before its tokens are read."""
    chance = random.Random(method)
    plain = make_engine(model, adapter, embedded_folder)
    guessing = make_engine(model, adapter, embedded_folder, LaunchingRunner, 60, **METHODS[method])
    unfinished = 0
    for wave in range(3):
        requests = [sampled_on_a_gpu(request) for request in some_requests(chance, wave, [])]
        expected, _ = run_wave(plain, requests, None)
        got, cancelled = run_wave(guessing, requests, chance)
        for request in requests:
            wanted, found = joined(expected[request.request_id]), got[request.request_id]
            if not (found and found[-1].finish_reason):
                assert request.request_id in cancelled
                assert tokens(found) == wanted.new_token_ids[: len(tokens(found))]
                unfinished += 1
            elif not is_at_a_boundary(model, adapter, request, tokens(found), wanted.new_token_ids):
                whole = joined(found)
                assert whole.new_token_ids == wanted.new_token_ids, request
                assert (whole.finish_reason, whole.stop_token_id) == (wanted.finish_reason, wanted.stop_token_id)
        assert guessing.stats().kv_blocks_used == 0
    stats, runner = guessing.stats(), guessing._runner
    assert isinstance(runner, LaunchingRunner)
    assert runner.launched_guesses > 15
    assert 0 < unfinished < 30
    assert stats.preemptions > 0
    assert stats.draft_tokens > sum(stats.accepted_by_place) > 20


def test_a_step_brings_several_tokens_and_says_how_guesses_fared(
    model: Any, adapter: LoraModule, embedded_folder: Path
) -> None:
    plain = make_engine(model, adapter, embedded_folder)
    guessing = make_engine(model, adapter, embedded_folder, speculation="lookup")
    # With this bias nothing else comes.
    request = make_request([5, 6, 7] * 5, max_tokens=40, logit_bias={9: 100.0}, ignore_eos=True)
    (expected,) = run_together(plain, request).values()
    (outputs,) = run_together(guessing, request).values()
    assert tokens(outputs) == tokens(expected) == [9] * 40
    assert len(expected) == 40
    assert len(outputs) < 15
    assert [output.finish_reason for output in outputs] == [*[None] * (len(outputs) - 1), "length"]
    timings, stats = outputs[-1].timings, guessing.stats()
    assert timings is not None
    assert timings.draft_tokens == stats.draft_tokens > 0
    assert timings.accepted_tokens == sum(stats.accepted_by_place) == 40 - len(outputs)
    alone = make_request([5, 6, 7] * 5, max_tokens=40, logit_bias={9: 100.0}, ignore_eos=True, speculation=False)
    assert len(next(iter(run_together(guessing, alone).values()))) == 40
    assert guessing.stats().draft_tokens == stats.draft_tokens


def test_a_step_with_guesses_that_fails_is_tried_without_them(
    model: Any, adapter: LoraModule, embedded_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request([5, 6, 7] * 5, max_tokens=20, logit_bias={9: 100.0}, ignore_eos=True)
    guessing = make_engine(model, adapter, embedded_folder, speculation="lookup")
    execute = guessing._runner.execute

    def faulty(step: Step) -> list[Sampled]:
        if step.guesses:
            raise RuntimeError("no memory for so many tokens")
        return execute(step)

    monkeypatch.setattr(guessing._runner, "execute", faulty)
    (outputs,) = run_together(guessing, request).values()
    assert tokens(outputs) == [9] * 20
    assert outputs[-1].finish_reason == "length"
