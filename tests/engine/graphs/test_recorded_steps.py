"""Recorded small steps: the bits of the compiled layers' own calls. test_layers.py has layers that cannot be recorded."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from server.config import EngineConfig, LoraModule
from server.engine.core import Engine
from server.engine.runtime.attention.paged_cpu import paged_cpu_error
from server.engine.runtime.compile.compiled_layer import CompiledLayer
from server.engine.runtime.graphs import recorded
from server.engine.runtime.graphs.recorded import MOST_TOKENS
from server.engine.runtime.graphs.traced import TracedSteps
from server.engine.runtime.model.decoder import decoder_layers
from server.engine.runtime.preparation import assembly, recording
from server.engine.runtime.runner import ModelRunner
from server.engine.scheduling.block_tables import BlockTables
from server.engine.scheduling.step import Chunk, Step
from server.engine.start import load_runner
from tests.adapters import save_adapter
from tests.engine.factories import make_request, make_sequence

pytestmark = pytest.mark.rest


def _logits(runner: ModelRunner) -> list[torch.Tensor]:
    """Logits of steps of 1 to 9 tokens, each twice: sequences that decode, and chunks of prompts beside one that decodes."""
    count = MOST_TOKENS + 1
    sequences = [make_sequence(5 + i) for i in range(count)]
    tables = BlockTables(count, 4)  # of 16 tokens each
    for i, sequence in enumerate(sequences):
        sequence.blocks = list(range(4 * i, 4 * i + 4))
        sequence.take_row(tables)
    lengths = [5 + i for i in range(count)]
    found = [runner.forward(Step([Chunk(s, 0, n, True) for s, n in zip(sequences, lengths, strict=True)]))]
    for batch in [*range(1, count + 1)] * 2:
        for i in range(batch):
            sequences[i].append(11 * batch + i)
        step = Step([Chunk(sequences[i], lengths[i], 1, True) for i in range(batch)])
        found.append(runner.forward(step))
        lengths[:batch] = [length + 1 for length in lengths[:batch]]
    for chunk in (3, 5):
        # The first one decodes; the last one's tokens are computed anew, as if they were a prompt's.
        sequences[0].append(chunk)
        last = Chunk(sequences[-1], 2, chunk, True)
        found.append(runner.forward(Step([Chunk(sequences[0], lengths[0], 1, True), last])))
        lengths[0] += 1
    return found


def _trace_up_to(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of up to so many tokens; each takes seconds to trace."""
    for module in (recording, recorded):
        monkeypatch.setattr(module, "MOST_TOKENS", most)


def test_a_traced_step_leaves_adapters_to_the_models_class(
    embedded_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the output layer alone does not keep the decoder layers from being recorded."""
    if (reason := paged_cpu_error()) is not None:
        pytest.skip(reason)
    _trace_up_to(2, monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(embedded_folder)
    save_adapter(model, tmp_path / "head", 3, 0.9, target_modules=["lm_head"], r=4)
    answers = []
    for eager in (False, True):
        modules = (LoraModule(name="head", path=tmp_path / "head"),)
        config = EngineConfig(device="cpu", kv_cache_bytes=50 << 20, enforce_eager=eager, lora_modules=modules)
        runner = load_runner(embedded_folder, config, lambda *_: None)
        assert isinstance(runner._paged.small_steps, TracedSteps) != eager
        engine = Engine(runner, config)
        asked = [make_request([504, 6, 700, 8], max_tokens=6, ignore_eos=True) for _ in range(2)]
        engine.add(asked[0])
        engine.add(msgspec.structs.replace(asked[1], request_id="adapted", adapter="head"))
        found: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step().outputs:
                found.setdefault(output.request_id, []).extend(output.new_token_ids)
        answers.append((found[asked[0].request_id], found["adapted"]))
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


@pytest.mark.parametrize("most", [2, pytest.param(MOST_TOKENS, marks=pytest.mark.slow)])
def test_recorded_steps_give_the_same_bits(embedded_folder: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := paged_cpu_error()) is not None:
        pytest.skip(reason)
    config = EngineConfig(device="cpu", kv_cache_bytes=50 << 20)
    monkeypatch.setattr(recording, "TRACING_SECONDS", 600.0)
    _trace_up_to(most, monkeypatch)
    ours = load_runner(embedded_folder, config, lambda *_: None)
    traced = ours._paged.small_steps
    assert isinstance(traced, TracedSteps)
    assert sorted(traced._steps) == list(range(1, most + 1))
    layers = decoder_layers(ours._paged.model)
    assert not any(isinstance(layer.forward, CompiledLayer) for layer in layers)
    monkeypatch.setattr(assembly, "record_with_trials", lambda *_: False)
    plain = load_runner(embedded_folder, config, lambda *_: None)
    assert plain._paged.small_steps is None
    assert all(isinstance(layer.forward, CompiledLayer) for layer in decoder_layers(plain._paged.model))
    assert all(map(torch.equal, _logits(ours), _logits(plain)))


def test_a_class_that_asks_for_values_is_not_traced(embedded_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := paged_cpu_error()) is not None:
        pytest.skip(reason)

    def asking(self: LlamaRotaryEmbedding, x: torch.Tensor, position_ids: torch.Tensor) -> object:
        # As rotary embeddings do that depend on the longest sequence.
        return rotate(self, x, position_ids) if position_ids.max().item() >= 0 else None

    rotate = LlamaRotaryEmbedding.forward
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", asking)
    runner = load_runner(embedded_folder, EngineConfig(device="cpu", kv_cache_bytes=50 << 20), lambda *_: None)
    traced = runner._paged.small_steps
    assert isinstance(traced, TracedSteps)
    assert not traced._steps
    assert not any(isinstance(layer.forward, CompiledLayer) for layer in decoder_layers(runner._paged.model))
    assert all(logits.isfinite().all() for logits in _logits(runner))
