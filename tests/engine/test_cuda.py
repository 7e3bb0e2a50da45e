"""The engine on a GPU: FlashInfer, CUDA graphs over written layers, async scheduling, against transformers' forward."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nf4_kernels import cuda
from server.config import EngineConfig
from server.engine.runtime.attention import paged_cuda
from server.engine.runtime.preparation import graph_capture
from server.engine.runtime.preparation.assembly import build_runner
from tests.engine.greedy_answers import LIMITS, NEAR_TIE, VOCABULARY, check_answers, random_prompts, small
from tests.nf4_kernels.cuda.cuda_weights import HOPPER

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("blocks", [None, 32])
@pytest.mark.parametrize("name", ["qwen3-8b", "gemma-3-27b", "llama-3.3-70b"])
def test_greedy_answers_are_the_best_tokens_of_transformers_own_forward(
    name: str, blocks: int | None, tmp_path: Path
) -> None:
    bytes_per_block = 16 * 7 * 2 * 2 * 128 * 2
    preempted = check_answers(
        name,
        tmp_path,
        random_prompts(1),
        NEAR_TIE,
        max_num_seqs=8,
        max_num_batched_tokens=100,
        kv_cache_bytes=(blocks or 2000) * bytes_per_block,
    )
    assert blocks is None or preempted > 0


def test_nearly_all_tokens_of_many_answers_are_the_best(tmp_path: Path) -> None:
    """More than one answer can show: of one, rounding may take a few more tokens to the other side of near ties."""
    check_answers("llama-3.3-70b", tmp_path, random_prompts(12), NEAR_TIE, 0.8, 0.975, **LIMITS)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_mixtures_of_experts_run_in_graphs(name: str, tmp_path: Path) -> None:
    """One token, few and many of them; where two experts are nearly as good, rounding decides which one a token gets."""
    prompts = random_prompts(1, seed=3)
    check_answers(
        name, tmp_path, prompts, 0.5, 0.75, 0.0, max_num_seqs=8, max_num_batched_tokens=100, kv_cache_bytes=1 << 28
    )  # fmt: skip


@HOPPER
@pytest.mark.parametrize("name", ["qwen3-8b", "gemma-3-27b", "llama-3.3-70b"])
def test_graphs_of_many_sequences_pass_on_tiled_activations(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles go from each layer's attention to its next GEMM, and from the GEMM with the gated activation to the next."""
    calls: Counter[str] = Counter()
    sequences = 48

    def counted(name: str) -> Callable[..., torch.Tensor]:
        function: Callable[..., torch.Tensor] = getattr(cuda, name)

        def call(*arguments: Any) -> torch.Tensor:
            # A gated GEMM tiles its result if its last argument, the tile, is not 0. Graphs of prompts are captured, too.
            tiled = name == "tiled_linear" or arguments[-1] > 0
            tokens = arguments[1] if name == "tiled_linear" else arguments[0].shape[0]
            calls[name] += torch.cuda.is_current_stream_capturing() and tiled and tokens == sequences
            return function(*arguments)

        return call

    for function in ("tiled_linear", "gated_linear"):
        monkeypatch.setattr(cuda, function, counted(function))
    monkeypatch.setattr(graph_capture, "decode_sizes", lambda largest: [largest])
    rng = random.Random(2)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 100))] for _ in range(12)]
    # Sums of wgmma and of transformers are up to two of the steps below apart, both logits each.
    limits = {"max_num_seqs": sequences, "max_num_batched_tokens": 512, "kv_cache_bytes": 1 << 28}
    check_answers(name, tmp_path, prompts, 0.035, **limits)
    assert calls == {"tiled_linear": 14, "gated_linear": 7}


@HOPPER
@pytest.mark.parametrize("name", ["qwen3-8b", "gemma-3-27b", "llama-3.3-70b"])
@pytest.mark.parametrize("by_triton", [True, False])
def test_attention_of_graphs_is_compiled_before_they_are_captured(
    name: str, by_triton: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its forms at once, which takes as long as one; what a capture has compiled then would be compiled alone.

    If nf4_kernels' kernel attends in graphs, Triton's is compiled for the steps before them only.
    """
    from triton import knobs  # type: ignore[import-not-found,import-untyped,unused-ignore]

    if by_triton:
        monkeypatch.setattr(paged_cuda, "can_attend", lambda *_: False)
    # Kernels are compiled for the length of the block tables, which no other test has.
    model = small(name, tmp_path, torch.device("cuda", 0))
    config = EngineConfig(device="cuda", max_model_len=6000, max_num_seqs=136, kv_cache_bytes=1 << 28)
    compiled: list[tuple[str, str]] = []
    stage = ["before"]
    set_up = paged_cuda.CudaBackend.set_up_graphs

    def set_up_graphs(*args: Any, **named: Any) -> None:
        stage[0] = "set up"
        set_up(*args, **named)

    monkeypatch.setattr(paged_cuda.CudaBackend, "set_up_graphs", set_up_graphs)

    def note(*, src: Any, **_: Any) -> None:
        compiled.append((stage[0], getattr(src, "name", "")))

    def progress(part: str, _: float) -> None:
        stage[0] = part

    before = knobs.compilation.listener
    knobs.compilation.listener = note
    try:
        build_runner(model, config, progress)
    finally:
        knobs.compilation.listener = before
    stages = [stage for stage, name in compiled if name == "_attend_newest"]
    assert len(stages) >= 3 if by_triton else {*stages} <= {"before"}
    assert not [stage for stage in stages if stage.startswith("capturing decode")]
