"""Tiny models with layers that keep a state of each sequence, and steps whose log-probabilities are transformers'."""

from __future__ import annotations

import copy
import functools
import importlib
import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.runner import ModelRunner
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.sequence import Sequence
from server.engine.scheduling.step import Step
from server.types import GenerateRequest
from tests.checkpoint.families import skip_where_refused
from tests.engine.factories import SchedulerDriver, run_together, tokens
from tests.engine.models import VOCABULARY, tiny_model

CONFIG = EngineConfig(device="cpu", block_size=4, kv_cache_bytes=2**20, max_num_batched_tokens=32, max_num_seqs=6)
TOLERANCE = 2e-4
"""Largest difference of log-probabilities: two orders of float32 sums through four layers of large weights."""
_OTHER_KERNELS = (
    "FusedRMSNormGated", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "causal_conv1d_fn",
    "causal_conv1d_update", "mamba2_chunk_scan", "mamba2_selective_state_update",
)  # fmt: skip


def without_other_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have transformers' models of a family compute with torch alone: kernels of fla are tuned for minutes, and round."""
    skip_where_refused(family)
    name = family.removesuffix("_text")
    source = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    for name in (*_OTHER_KERNELS, "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        if hasattr(source, name):
            plain = getattr(getattr(source, name), "__wrapped__", None)
            if plain is not None or name in _OTHER_KERNELS:
                monkeypatch.setattr(source, name, plain)


@functools.cache
def model_of(family: str) -> PreTrainedModel:
    return tiny_model(family)


@functools.cache
def runner_of(family: str, **changes: Any) -> ModelRunner:
    return build_runner(copy.deepcopy(model_of(family)), CONFIG.model_copy(update=changes))


def engine_of(family: str, config: EngineConfig) -> Engine:
    """An engine that runs steps one by one."""
    return Engine(build_runner(copy.deepcopy(model_of(family)), config), config)


def state_bytes(family: str) -> int:
    """Bytes of the states of one sequence."""
    pool = runner_of(family).states
    assert pool is not None
    return sum(kind.nbytes for kind in pool.kinds)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(3, VOCABULARY) for _ in range(length)]


def reference_logits(family: str, ids: list[int]) -> torch.Tensor:
    """transformers' own, float32 [tokens, vocabulary]."""
    with torch.inference_mode():
        logits: torch.Tensor = model_of(family)(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def say_few_tokens(model: Any) -> None:
    """Change a model's weights so that its answers repeat themselves, though not always."""
    head = model.get_output_embeddings()
    head.weight[:12] *= 6
    head.weight[12:] *= 0.05
    for name, parameter in model.named_parameters():
        if name.endswith(("out_proj.weight", "o_proj.weight")):
            parameter.mul_(0.3)


def answers(engine: Engine, *requests: GenerateRequest) -> list[list[int]]:
    outputs = run_together(engine, *requests)
    return [tokens(outputs[request.request_id]) for request in requests]


def check_steps(family: str, runner: ModelRunner, scheduler: Scheduler, sequences: list[Sequence]) -> None:
    """Run sequences through a scheduler; the log-probabilities of every token are transformers'."""
    assert scheduler._blocks.num_blocks <= runner.limits.num_blocks
    found: list[tuple[Sequence, int, torch.Tensor]] = []
    rng = random.Random(1)
    driver = SchedulerDriver(scheduler, lambda _: rng.randrange(3, VOCABULARY))

    def run(step: Step) -> None:
        rows = zip(step.sampled, runner.forward(step), strict=True)
        found.extend((chunk.sequence, chunk.start + chunk.length, row) for chunk, row in rows)

    for sequence in sequences:
        scheduler.add(sequence)
    while driver.has_work:
        driver.step(run)
    expected = {s.request_id: reference_logits(family, s.tokens).log_softmax(-1) for s in sequences}
    assert len(found) == sum(sequence.num_generated for sequence in sequences)
    for sequence, length, row in found:
        difference = row.log_softmax(-1) - expected[sequence.request_id][length - 1]
        assert difference.abs().max() < TOLERANCE, (sequence, length)
