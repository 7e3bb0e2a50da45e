"""Speculation on a GPU: graphs of steps with draft tokens, and answers with it and without."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.batch import Batch, Span, Spans
from server.engine.runtime.graphs.graph_set import DRAFT_SIZES
from server.engine.runtime.graphs.launched_step import LaunchedStep
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.runner import ModelRunner
from server.engine.runtime.sampling.sampler import ModelOutput
from server.engine.runtime.trials import relative_error
from server.engine.scheduling.step import Step
from server.engine.speculation.costs import StepCosts
from server.types import GenerateRequest
from tests.engine.factories import make_request, run_together, tokens
from tests.engine.greedy_answers import small

pytestmark = pytest.mark.gpu

# So few that there is always something to propose, and much of it wrong.
VOCABULARY = 40
CHEAP = StepCosts({n: 1 + n / 1000 for n in DRAFT_SIZES}, {n: 1 + n / 1000 for n in range(1, 33)})


def runner_of(name: str, folder: Path, **options: Any) -> tuple[ModelRunner, EngineConfig]:
    model = small(name, folder, torch.device("cuda", 0), vocab_size=VOCABULARY)
    config = EngineConfig(
        device="cuda", max_model_len=512, max_num_seqs=8, kv_cache_bytes=1 << 28, speculation="lookup",
        enable_prefix_caching=False, **options,
    )  # fmt: skip
    return build_runner(model, config), config


def requests() -> list[GenerateRequest]:
    chance = random.Random(3)
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.3, "seed": 7},
        {"temperature": 1.0, "top_p": 0.9, "seed": 9, "logprobs": 2},
        {"min_tokens": 70, "logit_bias": {7: 2.0}},
        {"speculation": False},
        {"presence_penalty": 0.5},
    ]
    prompts = [[chance.randrange(3, VOCABULARY) for _ in range(n)] * 3 for n in (3, 10, 30, 50, 8, 9)]
    return [make_request(p, max_tokens=100, **o) for p, o in zip(prompts, options, strict=True)]


def answers(
    runner: ModelRunner, config: EngineConfig, speculation: str, asked: list[GenerateRequest] | None = None
) -> tuple[list[list[int]], Engine]:
    engine = Engine(runner, config.model_copy(update={"speculation": speculation}))
    if engine._speculator is not None:
        engine._speculator.costs = CHEAP
    asked = requests() if asked is None else asked
    outputs = run_together(engine, *asked)
    assert not any(output.error for found in outputs.values() for output in found)
    return [tokens(outputs[request.request_id]) for request in asked], engine


@pytest.mark.parametrize("name", ["qwen3-8b", "gemma-3-27b", "llama-3.3-70b"])
def test_steps_with_draft_tokens_have_graphs_that_compute_what_the_model_does(name: str, tmp_path: Path) -> None:
    runner, config = runner_of(name, tmp_path)
    # They are compared with the model's own code when they are captured, and left out where they differ.
    assert runner._graphs.verify is not None
    assert runner._graphs.verify.sizes == list(DRAFT_SIZES)
    expected, _ = answers(runner, config, "off")
    got, engine = answers(runner, config, "lookup")
    stats = engine.stats()
    assert 0 < sum(stats.accepted_by_place) < stats.draft_tokens
    # Rounding differs with a step's size, so a near tie may fall to the other side, and what follows it is another text.
    same = [sum(a == b for a, b in zip(one, other, strict=False)) for one, other in zip(expected, got, strict=True)]
    assert sum(same) > 0.3 * sum(map(len, expected)), same


@torch.inference_mode()
@pytest.mark.parametrize("name", ["qwen3-8b", "gemma-3-27b"])
def test_logits_of_draft_tokens_behind_long_contexts(name: str, tmp_path: Path) -> None:
    """Contexts of several tiles of keys, some of them split into parts; three sequences, one with a single token."""
    runner, _ = runner_of(name, tmp_path)
    paged, verify = runner._paged, runner._graphs.verify
    assert verify is not None
    chance = random.Random(5)
    size, contexts, checked = paged.block_size, (130, 300, 450), (1, 6, 8)
    row, spans = 0, []
    for first, context, count in zip((0, 40, 80), contexts, checked, strict=True):
        # A span has the blocks up to its end, and no more.
        own = range(first, first - (-(context + count) // size))
        paged.run(_step([Span(0, 0, context, own[: -(-context // size)])], paged, chance, all_rows=False))
        spans.append(Span(row, context, count, own))
        row += count
    batch = _step(spans, paged, chance)
    assert verify.fits(batch)
    found = verify.run(batch).logits.float()
    expected = paged.run(batch)
    for rows in (slice(0, 1), slice(1, 7), slice(7, 15)):
        assert relative_error(found[rows], expected[rows]) < 0.05


def _step(spans: list[Span], paged: PagedModel, chance: random.Random, all_rows: bool = True) -> Batch:
    """A step of random tokens."""
    positions = torch.tensor([p for span in spans for p in range(span.start, span.end)])
    size = paged.block_size
    slots = [span.blocks[p // size] * size + p % size for span in spans for p in range(span.start, span.end)]
    ids = torch.tensor([chance.randrange(3, VOCABULARY) for _ in slots])
    wanted = torch.arange(len(slots)) if all_rows else torch.tensor([len(slots) - 1])
    singles = sum(span.length == 1 for span in spans)
    return Batch(ids, positions, torch.tensor(slots), wanted, Spans.of(spans), singles)


def test_tokens_that_a_graph_samples_are_those_of_its_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with draft tokens are launched, whatever options their sequences have."""
    runner, config = runner_of("qwen3-8b", tmp_path)
    assert runner._graphs.verify is not None
    launched: list[int] = []
    execute_async = runner.execute_async

    def noted(step: Step, previous: LaunchedStep | None) -> LaunchedStep | None:
        found = execute_async(step, previous)
        if step.drafts:
            assert found is not None
            launched.append(len(step.chunks))
        return found

    monkeypatch.setattr(runner, "execute_async", noted)
    found = []
    several: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "seed": 3},
        {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "seed": 5},
        {"repetition_penalty": 1.1, "logit_bias": {9: 1.0}, "min_tokens": 20},
    ]
    for options in several:
        asked = [make_request([5 + i, 9, 7] * 10, max_tokens=60, **options) for i in range(3)]
        found.append((asked, answers(runner, config, "lookup", asked)[0]))
    assert launched
    monkeypatch.setattr(runner, "execute_async", lambda *given: None if given[0].drafts else execute_async(*given))
    for asked, tokens_found in found:
        assert answers(runner, config, "lookup", asked)[0] == tokens_found


def test_with_batch_invariant_answers_are_equal(tmp_path: Path) -> None:
    runner, config = runner_of("qwen3-8b", tmp_path, batch_invariant=True)
    expected, _ = answers(runner, config, "off")
    got, engine = answers(runner, config, "lookup")
    assert got == expected
    assert sum(engine.stats().accepted_by_place) > 0


def drafting_runner(folder: Path, **options: Any) -> tuple[ModelRunner, EngineConfig]:
    """A model of one shape, and a draft model that is the same but for its last layers, which it lacks."""
    model, draft = (small("qwen3-8b", folder, torch.device("cuda", 0), vocab_size=VOCABULARY) for _ in range(2))
    draft.model.layers = draft.model.layers[:1]
    draft.config.num_hidden_layers = 1
    # Later layers of the model say little, so that both mostly agree.
    for layer in model.model.layers[1:]:
        layer.self_attn.o_proj.weight.quant_state.offset *= 0.02
        layer.self_attn.o_proj.weight.quant_state.state2.absmax *= 0.02
        layer.mlp.down_proj.weight.quant_state.offset *= 0.02
        layer.mlp.down_proj.weight.quant_state.state2.absmax *= 0.02
    config = EngineConfig(
        device="cuda", max_model_len=512, max_num_seqs=8, kv_cache_bytes=1 << 28, speculation="draft", draft_model="-",
        **options,
    )  # fmt: skip
    return build_runner(model, config, draft=draft), config


def drafted(runner: ModelRunner, config: EngineConfig) -> tuple[list[list[int]], list[list[int]], Engine]:
    expected, _ = answers(runner, config, "off")
    got, engine = answers(runner, config, "draft")
    return expected, got, engine


def test_a_draft_model_has_graphs_and_is_right(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner, config = drafting_runner(tmp_path)
    model = runner.draft_model
    assert model is not None
    assert model._graphs is not None
    assert model._graphs.verify is not None
    assert model._graphs.decode.sizes == [1, *DRAFT_SIZES[:-1]]
    expected, got, _ = drafted(runner, config)
    # The draft model knows neither penalties nor biases. Two of the others are sampled from nearly flat distributions. By
    # chance one of VOCABULARY is right.
    known = [asked for asked in requests() if not (asked.sampling.presence_penalty or asked.sampling.logit_bias)]
    stats = answers(runner, config, "draft", known)[1].stats()
    assert 0.25 * stats.draft_tokens < sum(stats.accepted_by_place)
    same = [sum(a == b for a, b in zip(one, other, strict=False)) for one, other in zip(expected, got, strict=True)]
    assert sum(same) > 0.3 * sum(map(len, expected)), same
    assert not [record for record in caplog.records if "draft model fails" in record.message]


def test_draft_tokens_in_graphs_are_those_without(tmp_path: Path) -> None:
    runner, config = drafting_runner(tmp_path)
    model = runner.draft_model
    assert model is not None
    found = []
    for graphs in (model._graphs, None):
        model._graphs = graphs
        _, engine = answers(runner, config, "draft")
        stats = engine.stats()
        found.append(sum(stats.accepted_by_place) / stats.draft_tokens)
    assert abs(found[0] - found[1]) < 0.1, found


def test_a_draft_model_with_batch_invariant(tmp_path: Path) -> None:
    runner, config = drafting_runner(tmp_path, batch_invariant=True)
    expected, got, engine = drafted(runner, config)
    assert got == expected
    assert sum(engine.stats().accepted_by_place) > 0


def test_draft_tokens_laid_out_on_the_device_are_those_laid_out_by_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, config = drafting_runner(tmp_path)
    model = runner.draft_model
    assert model is not None
    assert model._graphs is not None
    run_next, launched = model._graphs.decode.run_next, [0, 0]

    def counted(newest: torch.Tensor) -> ModelOutput | None:
        found = run_next(newest)
        launched[found is not None] += 1
        return found

    monkeypatch.setattr(model._graphs.decode, "run_next", counted)
    rates, given = [], []
    for on_device in (True, False):
        if not on_device:
            monkeypatch.setattr(model._graphs.decode, "run_next", lambda *_: None)
        got, engine = answers(runner, config, "draft")
        stats = engine.stats()
        rates.append(sum(stats.accepted_by_place) / stats.draft_tokens)
        given.append(got)
    assert launched[True] > 10, launched
    assert launched[False] == 0
    assert abs(rates[0] - rates[1]) < 0.1, rates
    same = sum(a == b for one, other in zip(*given, strict=True) for a, b in zip(one, other, strict=False))
    assert same > 0.3 * sum(map(len, given[0])), same
