"""Engines with speculation for tests, random requests for them, and how two runs of the same requests compare."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from peft import PeftModel
from transformers import RepetitionPenaltyLogitsProcessor

from server.config import EngineConfig, LoraModule
from server.engine.core import Engine
from server.engine.grammar import Grammars
from server.engine.runtime.graphs.launched_step import LaunchedStep
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.runner import ModelRunner
from server.engine.runtime.sampling.random_rows import uniforms
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.scheduling.step import Step
from server.engine.speculation.costs import StepCosts
from server.types import GenerateRequest, RequestOutput, SamplingParams, TokenLogprob
from tests.engine.factories import fix_costs
from tests.engine.models import tiny_model
from tests.engine.test_async_scheduling import AsyncRunner

WAVE = 20
# That of the embedded model, whose tokenizer the grammars need.
VOCABULARY = 49152
# Draft tokens cost nearly nothing, so there are many, and many wrong ones.
CHEAP = StepCosts({size: 1 + size / 1000 for size in range(1, 17)})
# They are worth it where they are likely right: steps with draft tokens and without take turns.
DEAR = StepCosts({size: 1 + size / 6 for size in range(1, 17)})
DEAR_DRAFTS = StepCosts({size: 1 + size / 6 for size in range(1, 17)}, drafting={1: 0.1, 2: 0.25, 6: 0.38})
GRAMMAR = '{"grammars": [{"lark_grammar": "start: /[a-c ]{4,40}/"}]}'
BYTES_PER_TOKEN = 768


@dataclass(frozen=True)
class ReadLater:
    """Stands for a step with draft tokens that has been launched."""

    step: Step
    results: list[Sampled]

    def complete(self) -> bool:
        return True

    def read(self) -> list[Sampled]:
        return self.results


class LaunchingRunner(AsyncRunner):
    """Launches steps, with draft tokens and without, as a GPU's runner does."""

    launched_drafts = 0

    def execute_async(self, step: Step, previous: LaunchedStep | None) -> LaunchedStep | None:
        if not step.drafts:
            return super().execute_async(step, previous)
        assert previous is None
        self.launched_drafts += 1
        # As on a GPU, what happens until the tokens are read changes nothing that the step computes.
        return cast(LaunchedStep, ReadLater(step, self.execute(step)))


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
    """Options of a request; about half of them are such that draft tokens come true."""
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
    engine: Engine, model: Any, adapter: LoraModule, request: GenerateRequest, one: list[int], other: list[int]
) -> bool:
    """Whether two answers part where the uniform number is as near to the boundary of both tokens as float32's rounding.

    The boundary is where one token's share of the distribution ends and the other's begins; these are two places where
    other tokens lie between, and both have to be as near. The distribution, of requests with a temperature and no filters,
    is found here in float64. What float32 rounds is what the log-probabilities of an idle engine are off here: logits that
    are off by e at most move the share F of all tokens below a boundary by 2 e F (1 - F) / temperature at most. Sums of the
    probabilities themselves may be off by 1e-6.
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
    # A repetition penalty multiplies logits, and what they are off, by itself or divides them.
    off = _error(engine, ids, request.adapter, logits) * max(
        sampling.repetition_penalty, 1 / sampling.repetition_penalty
    )
    logits = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(torch.tensor([ids]), logits[None])[0]
    counts = torch.bincount(answer, minlength=len(logits))
    logits -= sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if place < sampling.min_tokens:
        ends = [*sampling.stop_token_ids, *([] if sampling.ignore_eos else [model.config.eos_token_id])]
        logits[ends] = -torch.inf
    lower, upper = sorted((one[place], other[place]))
    shares = torch.softmax(logits / sampling.temperature, -1)
    assert sampling.seed is not None
    drawn = float(uniforms([sampling.seed], [len(ids)])[0])
    for boundary in (shares[: lower + 1].sum().item(), shares[:upper].sum().item()):
        rounding = 1e-6 + 2 * off * boundary * (1 - boundary) / sampling.temperature
        if abs(boundary - drawn) >= rounding:
            return False
    return True


def _error(engine: Engine, ids: list[int], adapter: str | None, logits: torch.Tensor) -> float:
    """Largest error of the engine's log-probabilities of the likeliest tokens behind ids; logits: the exact ones."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    (outputs,) = run_wave(engine, [GenerateRequest("error", ids, sampling, adapter)], None)[0].values()
    (found,) = joined(outputs).logprobs or []
    exact = torch.log_softmax(logits, -1)
    error = max(abs(logprob - exact[token].item()) for token, logprob in found.top)
    # AMX multiplies float32 as two parts in bfloat16, which hold 16 bits: 1.3e-3 was seen where logits go to 18.
    assert error < 1e-2, "the engine's log-probabilities are wrong, not rounded"
    return error
