"""What inductor's small kernels are made to be: the smallest blocks of those it offers, norms in one piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import HeuristicType
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import run_and_get_code

from nf4_kernels import cuda
from server.engine.runtime.compile.block_sizes import small_kernels_by_rule
from server.engine.runtime.compile.pdl import dependent_launches


@dataclass
class _Kernel:
    """What of inductor's CachingAutotuner is asked."""

    heuristic_type: HeuristicType
    launchers: list[Any] = field(default_factory=list)
    size_hints: dict[str, int] | None = None


def launcher(num_warps: int, **blocks: int) -> Any:
    return SimpleNamespace(config=SimpleNamespace(kwargs=blocks, num_warps=num_warps))


@pytest.mark.parametrize("kind", [HeuristicType.POINTWISE, HeuristicType.PERSISTENT_REDUCTION])
def test_the_smallest_blocks_are_taken(kind: HeuristicType) -> None:
    offered = [
        launcher(4, XBLOCK=32),
        launcher(4, XBLOCK_0=8, XBLOCK_1=2),
        launcher(2, XBLOCK=8, YBLOCK=2, R0_BLOCK=64),
    ]
    kernel = _Kernel(kind, offered)
    with small_kernels_by_rule():
        tune: Callable[..., None] = CachingAutotuner.autotune_to_one_config
        tune(kernel)
    assert kernel.launchers == [offered[2]]


@pytest.mark.parametrize(
    ("kind", "hints", "taken"),
    [
        (HeuristicType.POINTWISE, {"x": 1 << 20}, 1),
        (HeuristicType.POINTWISE, {"x": 1 << 21}, 0),
        (HeuristicType.POINTWISE, {"x": 1 << 10, "y": 1 << 11}, 0),
        (HeuristicType.PERSISTENT_REDUCTION, {"x": 1 << 12, "r0_": 1 << 12}, 1),
    ],
)
def test_the_largest_blocks_are_taken_for_many_elements(kind: HeuristicType, hints: dict[str, int], taken: int) -> None:
    offered = [launcher(4, XBLOCK=1024), launcher(8, XBLOCK=512)]
    kernel = _Kernel(kind, list(offered), hints)
    with small_kernels_by_rule():
        tune: Callable[..., None] = CachingAutotuner.autotune_to_one_config
        tune(kernel)
    assert kernel.launchers == [offered[taken]]


def test_loops_are_timed_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []
    monkeypatch.setattr(CachingAutotuner, "autotune_to_one_config", lambda kernel, *args: timed.append((kernel, *args)))
    kernel = _Kernel(
        HeuristicType.REDUCTION, [launcher(8, XBLOCK=1, R0_BLOCK=2048), launcher(8, XBLOCK=1, R0_BLOCK=64)]
    )
    with small_kernels_by_rule():
        tune: Callable[..., None] = CachingAutotuner.autotune_to_one_config
        tune(kernel, 1)
    assert timed == [(kernel, 1)]
    assert len(kernel.launchers) == 2


def test_nothing_is_left_behind() -> None:
    before = InductorChoices.should_use_persistent_reduction, CachingAutotuner.autotune_to_one_config
    with small_kernels_by_rule():
        assert InductorChoices.should_use_persistent_reduction is not before[0]
        assert torch.compiler.config.cache_key_tag
        assert not torch._inductor.config.autotune_local_cache
        assert torch._inductor.config.combo_kernels
    assert (InductorChoices.should_use_persistent_reduction, CachingAutotuner.autotune_to_one_config) == before
    assert not torch.compiler.config.cache_key_tag
    assert torch._inductor.config.autotune_local_cache


@pytest.mark.gpu
@pytest.mark.skipif(cuda.load_error() is not None, reason=f"CUDA kernels: {cuda.load_error()}")
@pytest.mark.parametrize(("columns", "in_registers"), [(5120, True), (20000, False)])
def test_a_row_of_a_norm_stays_in_registers(columns: int, in_registers: bool) -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x.float(), x.shape[-1:]).to(x.dtype)

    # So many rows that inductor does not share one out among blocks.
    x = torch.randn(1024, columns, device="cuda", dtype=torch.bfloat16)
    with small_kernels_by_rule():
        found, code = run_and_get_code(torch.compile(norm, dynamic=False), x)
    assert torch.allclose(found, norm(x), atol=0.02)
    assert ("@triton_heuristics.persistent_reduction" in code[0]) == in_registers


@pytest.mark.gpu
@pytest.mark.skipif(cuda.load_error() is not None, reason=f"CUDA kernels: {cuda.load_error()}")
def test_norms_of_two_inputs_are_one_launch() -> None:
    def norms(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = (torch.nn.functional.rms_norm(x.float(), x.shape[-1:]).to(x.dtype) for x in (q, k))
        return q, k

    q, k = (torch.randn(3, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (64, 8))
    with dependent_launches(), small_kernels_by_rule():
        found, code = run_and_get_code(torch.compile(norms, dynamic=False), q, k)
    assert all(torch.allclose(a, b, atol=0.02) for a, b in zip(found, norms(q, k), strict=True))
    assert code[0].count(".run(") == 1
    # Each half lets the next launch start, and waits, before it reads.
    assert code[0].count("gdc_launch_dependents") == code[0].count("gdc_wait") == 2
