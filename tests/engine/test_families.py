"""Logits over the paged cache against transformers' own forward, for every family, chunked and mixed."""

from __future__ import annotations

import copy
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from server.config import EngineConfig
from server.engine.runtime.attention.base import LayerShape, UnsupportedModelError
from server.engine.runtime.attention.probe import probe_layers
from server.engine.runtime.attention.sdpa import SdpaBackend
from server.engine.runtime.limits import EngineConfigError, own_limit
from server.engine.runtime.preparation import cache
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.scheduling.blocks import BlockManager
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.sequence import Sequence
from server.engine.scheduling.step import Step
from tests.engine.factories import SchedulerDriver, make_sequence
from tests.engine.models import FAMILIES, VOCABULARY, tiny_model
from tests.marks import with_rest

CONFIG = EngineConfig(block_size=4, kv_cache_bytes=2**20, max_num_batched_tokens=16, max_num_seqs=5, enforce_eager=True)


def _reference_backend(
    shapes: list[LayerShape],
    _: object,
    blocks: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    *others: object,
) -> SdpaBackend:
    return SdpaBackend(shapes, blocks, size, dtype, device)


@pytest.mark.parametrize(
    ("backend", "family"),
    with_rest(
        itertools.product(("reference", "cpu"), FAMILIES),
        lambda case: case[0] == "cpu" or case[1] in ("gemma2", "gemma4_text", "gpt_oss", "phi3", "youtu"),
    ),
)
def test_chunked_and_mixed_batches_give_transformers_logits(
    family: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "reference":
        monkeypatch.setattr(cache, "create_backend", _reference_backend)
    model = tiny_model(family)
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")  # in 5.17 transformers' sdpa computes Gemma 2 without its caps
    runner = build_runner(model, CONFIG)
    rng = random.Random(family)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(n)] for n in (1, 5, 41, 17, 30, 2, 9)]
    sequences = [make_sequence(prompt, max_tokens=6) for prompt in prompts]
    # 40 blocks hold about half of it, so that some are preempted.
    blocks = BlockManager(40, CONFIG.block_size)
    scheduler = Scheduler(blocks, CONFIG.max_num_seqs, CONFIG.max_num_batched_tokens, 128)
    for sequence in sequences:
        scheduler.add(sequence)
    found: list[tuple[Sequence, int, torch.Tensor]] = []
    driver = SchedulerDriver(scheduler, lambda _: rng.randrange(3, VOCABULARY))

    def run(step: Step) -> None:
        rows = zip(step.sampled, runner.forward(step), strict=True)
        found.extend((chunk.sequence, chunk.start + chunk.length, row) for chunk, row in rows)

    while driver.has_work:
        driver.step(run)
    assert len(found) == 6 * len(sequences)
    expected = {s.request_id: _reference_logits(reference, s.tokens) for s in sequences}
    for sequence, length, row in found:
        torch.testing.assert_close(row, expected[sequence.request_id][length - 1], atol=1e-4, rtol=1e-4)


def _reference_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def test_windows_and_soft_caps_are_those_of_each_layer() -> None:
    _, options, sinks = probe_layers(tiny_model("gemma2"))
    assert [o.window for o in options] == [12, None, 12, None]
    assert {o.softcap for o in options} == {2.0}
    assert not sinks


def test_layers_that_keep_state_elsewhere_are_refused() -> None:
    model = tiny_model("llama")
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        probe_layers(model)


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, 256),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 256),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}}, 64),
        ({"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 48}, 48),
        # One for each kind of layer, as Gemma 3 has them.
        ({"rope_parameters": {"sliding_attention": {"rope_type": "default"},
                              "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 64}}}, 64),
        ({"layer_types": ["chunked_attention"], "attention_chunk_size": 32}, 32),
        ({"layer_types": ["chunked_attention"], "attention_chunk_size": 64, "attn_temperature_tuning": True,
          "floor_scale": 40}, 39),
        ({"attn_temperature_tuning": False, "floor_scale": 40}, 256),
    ],
)  # fmt: skip
def test_contexts_end_where_a_token_would_depend_on_others_lengths(settings: dict[str, Any], limit: int) -> None:
    assert own_limit(SimpleNamespace(max_position_embeddings=256, **settings)) == limit


def test_limits_come_from_the_model_the_cache_and_the_configuration() -> None:
    model = tiny_model("llama")
    assert build_runner(model, CONFIG).limits.max_model_len == 256
    # 3 layers, 2 heads of 16, keys and values, float32: 768 bytes a token.
    small = CONFIG.model_copy(update={"kv_cache_bytes": 768 * 100})
    assert build_runner(model, small).limits.max_model_len == 100
    with pytest.raises(EngineConfigError, match="holds 100 tokens"):
        build_runner(model, small.model_copy(update={"max_model_len": 101}))
    with pytest.raises(EngineConfigError, match="made for 256"):
        build_runner(model, CONFIG.model_copy(update={"max_model_len": 257}))
    limits = build_runner(model, CONFIG.model_copy(update={"max_model_len": 64})).limits
    assert (limits.max_model_len, limits.num_blocks) == (64, 5 * 16)
    assert limits.eos_token_ids == (2,)
    assert limits.vocab_size == VOCABULARY
