"""Parts of the GPU engine alone: the cache write, written layers, tokens sampled behind a graph."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.batch import Batch
from server.engine.runtime.graphs.invariant import INVARIANT_ROWS
from server.engine.runtime.layers.decoder import DecoderLayer
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.preparation.trial_steps import TRIAL_TOLERANCES
from server.engine.runtime.runner import ModelRunner
from server.engine.runtime.sampling import ops
from server.engine.runtime.sampling.sampler import ModelOutput, Sampler
from server.types import GenerateRequest
from tests.engine.factories import make_request, make_sequence, run_together, sample, tokens
from tests.engine.greedy_answers import VOCABULARY, small

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("heads", "dim", "block_size"), [(8, 128, 16), (3, 64, 4), (1, 256, 1)])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_write_kv_writes_its_slots_and_nothing_else(heads: int, dim: int, block_size: int, tokens: int) -> None:
    from server.engine.runtime.attention.kernels.kv_write import write_kv

    blocks = 320 // block_size
    cache = torch.full((blocks, 2, block_size, heads, dim), -77.0, dtype=torch.bfloat16, device="cuda")
    expected = cache.clone()
    slots = torch.randperm(blocks * block_size, device="cuda")[:tokens]
    # As a slice of joined projections, and with heads before tokens.
    key = torch.randn(tokens, 3 * heads * dim, device="cuda").bfloat16()[:, heads * dim : 2 * heads * dim]
    key = key.view(tokens, heads, dim)
    value = torch.randn(heads, tokens, dim, device="cuda").bfloat16().transpose(0, 1)
    write_kv(cache, key, value, slots)
    expected[slots // block_size, 0, slots % block_size] = key
    expected[slots // block_size, 1, slots % block_size] = value
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [True, False])
def test_tokens_sampled_on_the_device_are_those_of_the_host(
    kernel: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops.use_kernels(torch.device("cuda", 0), dtype, 151_936)
    assert "cuda" in ops._kernels
    if not kernel:
        monkeypatch.delitem(ops._kernels, "cuda")
    sequences = [
        make_sequence(index + 1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=index)
        for index, (temperature, top_k, top_p, min_p) in enumerate(
            [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 40, 0.9, 0.0), (1.3, 0, 0.95, 0.0), (1.0, 0, 1.0, 0.1)] * 8
        )
    ]
    logits = (torch.randn(len(sequences), 151_936) * 3).to(dtype)
    on_host, on_device = ([result.token for result in sample(x, sequences)] for x in (logits, logits.cuda()))
    # Sums in another order may give the next token.
    assert sum(a == b for a, b in zip(on_host, on_device, strict=True)) > 0.9 * len(sequences)


def test_options_on_the_device_are_those_of_the_host() -> None:
    options: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0, "logprobs": 3},
        {},
        {"frequency_penalty": 0.5, "logit_bias": {7: 3.0, 9: -100.0}},
        {"min_tokens": 2, "stop_token_ids": tuple(range(0, 2000, 2)), "logprobs": 0},
    ]
    ops.use_kernels(torch.device("cuda", 0), torch.float32, 2000)
    sequences = [make_sequence(index % 7 + 1, **options[index % 5]) for index in range(40)]
    on_device = Sampler(2000, torch.device("cuda", 0))
    newest: torch.Tensor | None = None
    for step in range(5):
        logits = torch.randn(len(sequences), 2000)
        expected = sample(logits.clone(), sequences)
        given = logits.cuda()
        best, greedy = given.max(-1)
        if step == 4:  # everything has been compiled and allocated
            torch.cuda.set_sync_debug_mode("error")
        try:
            launched = on_device.launch(ModelOutput(given, (best, greedy), newest), sequences)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        newest = launched.tokens
        for sequence, one, other in zip(sequences, launched.read(), expected, strict=True):
            assert one.token == other.token
            assert (one.logprob is None) == (other.logprob is None)
            if one.logprob is not None and other.logprob is not None:
                assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-4)
                assert [token for token, _ in one.logprob.top] == [token for token, _ in other.logprob.top]
            sequence.append(other.token)


def make_engine(folder: Path, **changes: object) -> tuple[Engine, ModelRunner]:
    model = small("qwen3-8b", folder, torch.device("cuda", 0))
    config = EngineConfig(
        device="cuda", max_num_seqs=8, max_num_batched_tokens=100, max_model_len=512, kv_cache_bytes=2**28
    ).model_copy(update=changes)
    runner = build_runner(model, config)
    return Engine(runner, config), runner


def test_options_within_async_scheduling_change_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[dict[str, Any]] = [
        {"repetition_penalty": 1.2, "logprobs": 2},
        {"presence_penalty": 0.5, "temperature": 0.9, "seed": 1},
        {"logit_bias": {5: 3.0}, "min_tokens": 9},
        {},
        {"temperature": 0.8, "top_p": 0.9, "seed": 2},
    ]
    requests = [make_request(5 + index, max_tokens=30, **options[index % 5]) for index in range(10)]
    engine, runner = make_engine(tmp_path)
    found = run_together(engine, *requests)
    # Each step is executed: the host knows all tokens.
    monkeypatch.setattr(runner, "execute_async", lambda *_: None)
    expected = run_together(engine, *requests)
    for request in requests:
        assert tokens(found[request.request_id]) == tokens(expected[request.request_id])


def test_layers_are_written_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, runner = make_engine(tmp_path)
    assert not [record for record in caplog.records if record.name.startswith("server.engine")]
    assert all(isinstance(layer.forward, DecoderLayer) for layer in runner._paged.model.get_decoder().layers)


def test_steps_with_prompts_run_as_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make_engine(tmp_path)
    mixed = runner._graphs.mixed
    assert mixed is not None
    replay, errors, kinds = mixed.run, [], set()

    def run(batch: Batch) -> ModelOutput:
        # The same step again, without a graph: it writes the same keys and values.
        expected = runner._paged.run(batch)
        output = replay(batch)
        errors.append(float((output.logits.float() - expected).norm() / expected.norm()))
        kinds.add((batch.num_single > 0, any(span.start > 0 and span.length > 1 for span in batch.spans)))
        return output

    monkeypatch.setattr(mixed, "run", run)
    rng = random.Random(3)
    for lengths in ((5,), (60, 33, 7), (150, 90, 2, 20, 64)):
        prompts = [[rng.randrange(3, VOCABULARY) for _ in range(n)] for n in lengths]
        for _ in range(2):  # the second time from the prefix cache
            answers(engine, *(make_request(p, max_tokens=5 + i, ignore_eos=True) for i, p in enumerate(prompts)))
    # Prompts alone and beside decoding sequences, from their beginning and from what is in the cache.
    assert {(False, False), (False, True), (True, True)} <= kinds
    assert max(errors) < TRIAL_TOLERANCES[torch.bfloat16], errors


def seeded_requests(*lengths: int) -> list[GenerateRequest]:
    rng = random.Random(2)
    return [
        make_request(
            [rng.randrange(3, VOCABULARY) for _ in range(n)],
            max_tokens=40, temperature=1.0, top_p=top_p, seed=n, ignore_eos=True,
        )
        for n, top_p in zip(lengths, (1.0, 0.9, 0.5, 1.0), strict=True)
    ]  # fmt: skip


def answers(engine: Engine, *together: GenerateRequest) -> dict[str, list[int]]:
    found = run_together(engine, *together)
    assert not any(output.error for outputs in found.values() for output in outputs)
    return {key: tokens(outputs) for key, outputs in found.items()}


def test_seeded_requests_do_not_depend_on_neighbours(tmp_path: Path) -> None:
    # Otherwise the number of neighbours chooses the kernels, whose roundings change tokens where logits lie close together.
    engine, _ = make_engine(tmp_path, batch_invariant=True)
    requests = seeded_requests(5, 60, 33, 150)
    alone = {key: value for request in requests for key, value in answers(engine, request).items()}
    assert answers(engine, *requests) == alone
    assert len({tuple(value) for value in alone.values()}) == len(requests)


def test_more_sequences_than_the_graph_of_batch_invariant_has_tokens(tmp_path: Path) -> None:
    count = INVARIANT_ROWS + 8
    engine, _ = make_engine(tmp_path, batch_invariant=True, max_num_seqs=count)
    requests = [make_request(3 + index, max_tokens=count, ignore_eos=True) for index in range(count)]
    together = answers(engine, *requests)
    last = requests[-1]
    assert answers(engine, last) == {last.request_id: together[last.request_id]}


def test_seeded_requests_under_async_scheduling_do_not_depend_on_their_order(tmp_path: Path) -> None:
    engine, _ = make_engine(tmp_path)
    # All prompts fit into the first step, so that the kernels are the same in any order.
    requests = seeded_requests(5, 20, 33, 40)
    found = answers(engine, *requests)
    again = answers(engine, *reversed(requests))
    assert answers(engine, *requests) == again
    assert {len(value) for value in found.values()} == {40}


def test_a_cache_of_no_given_size_is_what_a_largest_step_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A part of the GPU's memory, so that other tests can run on it at the same time.
    total = 8 * 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _=None: (total - torch.cuda.memory_reserved(), total))
    torch.cuda.empty_cache()
    before, free = torch.cuda.memory_allocated(), total - torch.cuda.memory_reserved()
    _, runner = make_engine(tmp_path, kv_cache_bytes=None, max_model_len=None, max_num_seqs=2048, enforce_eager=True)
    allocated = torch.cuda.memory_allocated() - before
    # What earlier tests' tensors leave between them in torch's memory is not free, and can be allocated.
    assert 0.8 * free < allocated < 0.98 * total - before
    assert runner.limits.num_blocks > 0
