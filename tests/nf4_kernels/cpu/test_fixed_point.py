"""GEMMs in 16-bit fixed point on CPU: the largest sums, unusual x, and what decides a result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from bitsandbytes.functional import quantize_4bit

from nf4_kernels import Weight, cpu, reference
from tests.nf4_kernels.weights import FIXED_POINT, float32_bound, quantized, using_isa

ROWS = (1, 2, 4, 5, 8, 9, 16, 17, 33, 70)


@pytest.fixture(params=FIXED_POINT, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every instruction set with fixed point that this CPU has, in turn."""
    with using_isa(request.param):
        yield


@pytest.mark.parametrize("rows", ROWS)
def test_no_sum_overflows(rows: int) -> None:
    """All codes of a block at their largest, all columns of x alike, or one far larger than the others."""
    signs = torch.ones(40, 128)
    signs[1::2] = -1
    packed, state = quantize_4bit(signs * 3, blocksize=64, quant_type="nf4", compress_statistics=False)
    weight = Weight.from_quant_state(packed, state)
    expanded = reference.dequantize(weight, torch.float32)
    alike = torch.ones(rows, 128)
    for values in (alike, -alike, alike * 1e-3, torch.randn(rows, 128)):
        for peak in (1.0, 1e4):
            x = values.clone()
            x[:, 70] *= peak
            exact = x.double() @ expanded.double().T
            found = cpu.linear(x, weight).double()
            # Codes are within 6e-5, x within half a step, and here all may be off to the same side.
            magnitudes = x.double().abs()
            steps = magnitudes.sum(-1, keepdim=True) / 340000 + magnitudes.amax(-1, keepdim=True) / 32767
            assert ((found - exact).abs() <= 3 * (6e-5 * magnitudes.sum(-1, keepdim=True) + 64 * steps)).all()


@pytest.mark.parametrize("rows", ROWS)
def test_x_of_any_magnitude_and_zeros(rows: int) -> None:
    q = quantized((33, 192), 64, True, seed=rows)
    expanded = reference.dequantize(q.weight, torch.float32)
    for factor in (1e-30, 1e-3, 1.0, 1e20):
        x = torch.randn(rows, 192) * factor
        x[:, :64] *= 1e-6
        x[rows // 2, 64:128] = 0
        exact = x.double() @ expanded.double().T
        error = float((cpu.linear(x, q.weight).double() - exact).norm() / exact.norm())
        assert error <= float32_bound(x, expanded, exact), factor
    for zeros in (torch.zeros(rows, 192), torch.full((rows, 192), 1e-42)):
        assert not cpu.linear(zeros, q.weight).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rows", ROWS)
def test_what_is_not_finite_stays_so_in_its_row_only(rows: int, value: float) -> None:
    q = quantized((33, 192), 64, True, seed=rows)
    x = torch.randn(rows, 192)
    expected = cpu.linear(x, q.weight)
    x[rows // 2, 100] = value
    found = cpu.linear(x, q.weight)
    assert not found[rows // 2].isfinite().any()
    others = torch.arange(rows) != rows // 2
    assert torch.equal(found[others], expected[others])


def test_a_row_is_the_same_numbers_in_any_batch() -> None:
    """Only float32 sums of exact sums of 64 columns differ, in their order."""
    q = quantized((96, 1536), 64, True, seed=1)
    x = torch.randn(100, 1536)
    together = cpu.linear(x, q.weight)
    for rows in ROWS:
        few = cpu.linear(x[:rows], q.weight)
        assert float((few - together[:rows]).norm() / together[:rows].norm()) < 1e-6, rows
