"""Fresh random NF4 weights, quantized by bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from bitsandbytes.functional import QuantState, quantize_4bit

from nf4_kernels import cpu
from nf4_kernels.format import Weight

FIXED_POINT = ("avx2", "avx512vnni")
"""The instruction sets with GEMMs in 16-bit fixed point (docs/adr/0027)."""


@contextmanager
def using_isa(name: str) -> Iterator[None]:
    """The CPU kernels use that instruction set while entered; the test is skipped where this CPU does not have it."""
    before = cpu.isa()
    try:
        cpu.set_isa(name)
    except ValueError as e:
        pytest.skip(str(e))
    try:
        yield
    finally:
        cpu.set_isa(before)


@contextmanager
def using_isa_or_torch(name: str, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """using_isa(), or with the name "torch" the torch code that is taken where a module of nf4_kernels.cpu takes nothing."""
    if name == "torch":
        monkeypatch.setattr(kernels, "takes", lambda p: False)
        yield
        return
    if cpu.load_error() is not None:
        pytest.skip("no CPU kernels")
    with using_isa(name):
        yield


@dataclass(frozen=True)
class Quantized:
    """One weight as bitsandbytes has it and as the ops take it."""

    packed: torch.Tensor
    state: QuantState
    weight: Weight

    @property
    def nested(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The ops' last three arguments."""
        return self.weight.nested


def quantized(
    shape: tuple[int, ...],
    blocksize: int,
    nested: bool,
    seed: int,
    dtype: torch.dtype = torch.float32,
    table: str = "nf4",
) -> Quantized:
    """A normal random weight with a few outliers, in NF4 or FP4."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 0.02
    values.view(-1)[:: max(1, values.numel() // 7)] *= 20
    packed, state = quantize_4bit(
        values.to(dtype), blocksize=blocksize, quant_type=table, compress_statistics=nested, quant_storage=torch.uint8
    )
    return Quantized(packed, state, Weight.from_quant_state(packed, state, (table,)))


def float32_bound(x: torch.Tensor, expanded: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest distance of a CPU GEMM from exact [..., N] (of x [..., K] and expanded [N, K]), relative to its norm.

    In float32 2e-5. In fixed point 1.5e-4 of the results' norm if the products' signs were random; the true norm may be
    smaller, since sums cancel.
    """
    if cpu.isa() not in FIXED_POINT:
        return 2e-5
    random = float(x.double().norm() * expanded.double().norm()) / x.shape[-1] ** 0.5
    return 2e-5 + 1.5e-4 * random / max(float(exact.norm()), 1e-30)


def is_close(found: torch.Tensor, exact: torch.Tensor, off: float | None = None) -> bool:
    """Whether float32 results are right: within off of their norm; 1e-4, or 3e-4 in fixed point, where bfloat16 has 2e-3."""
    if off is None:
        off = 3e-4 if cpu.isa() in FIXED_POINT else 1e-4
    return bool((found.double() - exact.double()).norm() <= off * exact.double().norm())
