"""The largest results of a GEMM with compact bfloat16, found by an 8-bit copy: they are those of all results."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nf4_kernels import cpu
from nf4_kernels.cpu.compact import CompactBf16
from nf4_kernels.cpu.screening import Screening
from tests.nf4_kernels.cpu.test_compact import bits, ordinary
from tests.nf4_kernels.weights import using_isa

WITH_SCREENING = ("avx2", "avx512", "avx512vnni")


@pytest.fixture(params=cpu.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that this CPU has, in turn."""
    with using_isa(request.param):
        yield request.param


def check(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    """largest() against linear(), all of whose results are exact; returns the share of results with the same bits."""
    compact = CompactBf16(weight)
    expected, got = compact.linear(x, bias), compact.largest(x, bias, Screening(weight))
    top, where = expected.max(-1, keepdim=True)
    assert torch.equal(got.max(-1).indices, where.squeeze(-1))
    same = (got == expected) | (got.view(torch.int32) == expected.view(torch.int32))
    # Whatever has other bits is smaller than the largest, in truth and in the approximation.
    assert bool((same | ((got < top) & (expected < top))).all())
    return float(same.float().mean())


def gaussian(n: int, k: int) -> torch.Tensor:
    """bfloat16 [n, k] as trained weights are distributed."""
    return (torch.randn(n, k) * 0.1).to(torch.bfloat16)


@pytest.mark.parametrize(("n", "k"), [(1, 32), (33, 64), (100, 576), (3000, 576), (257, 4096)])
def test_the_largest_result_is_that_of_all(isa: str, n: int, k: int) -> None:
    weight, bias = gaussian(n, k), torch.randn(n)
    for rows in (1, 2, 3, 8, 48, 49):
        x = torch.randn(rows, k) * torch.rand(rows, 1) * 10
        shares = [check(weight, x, given) for given in (None, bias)]
        if n == 3000 and isa in WITH_SCREENING and rows <= 48:
            assert max(shares) < 0.5  # or nothing would be saved


def test_an_input_that_stands_out(isa: str) -> None:
    """As activations do: a few columns are far larger than the others, in x and in the weight."""
    weight, x = gaussian(2000, 576), torch.randn(5, 576)
    weight[:, 7] *= 40
    x[:, 7] *= 100
    x[1, 9] = 1e4
    check(weight, x)


@pytest.mark.parametrize(("power", "x_power"), [(0, 0), (-75, 0), (-75, 40), (-100, -30), (0, -130), (60, -140)])
def test_rows_that_8_bits_do_not_tell_apart(isa: str, power: int, x_power: int) -> None:
    """Their scales and nearly all codes are equal, so that only their exact results can say which is the largest.

    Also where squares of the weight's numbers, or results, are too small for float32.
    """
    row = torch.randn(320).to(torch.bfloat16)
    row[0] = 4.0
    weight = row.repeat(500, 1)
    for i in range(500):
        # The next number of bfloat16, or the one after it, somewhere where that is less than half a code.
        column = 1 + torch.where(row[1:].abs() < 1)[0][i % 100]
        weight.view(torch.int16)[i, column] += 1 + i // 100
    weight *= 2.0**power
    screening = Screening(weight)
    assert float((screening._codes == screening._codes.median(0).values).float().mean()) > 0.999
    for _ in range(20):
        check(weight, torch.randn(3, 320) * 2.0**x_power)


@pytest.mark.parametrize("seed", range(40))
def test_numbers_of_any_magnitude(isa: str, seed: int) -> None:
    """Rows of up to three magnitudes, some of them zero or the same, and x of any; results that are equal or nearly so."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    n, k, rows = int(integers(1, 400)), 32 * int(integers(1, 12)), int(integers(1, 6))
    powers = torch.cat((integers(-126, 100, 2), torch.zeros(1, dtype=torch.int64)))[integers(0, 3, n)]
    magnitudes = 0.5 + 1.5 * torch.rand(n, k, generator=generator)
    # With signs of a row's own, so that the largest result may be of the smallest row.
    signs = (integers(0, 2, n, 1) if seed % 2 else integers(0, 2, n, k)) * 2 - 1
    weight = (magnitudes * signs * 2.0 ** powers[:, None].double()).to(torch.bfloat16)
    weight[integers(0, n, n // 8)] = weight[integers(0, n, n // 8)]
    weight[integers(0, n, n // 8)] = 0
    x = torch.rand(rows, k, generator=generator) * 2.0 ** integers(-145, 127, rows, 1)
    bias = torch.randn(n, generator=generator) * 2.0 ** integers(-60, 60, n) if seed % 3 else None
    if bias is not None and seed % 3 == 2:
        bias[integers(0, n, n // 2)] = -torch.inf
    check(weight, x, bias)


@pytest.mark.parametrize("infinite", [-torch.inf, torch.inf])
def test_a_bias_that_is_infinite(isa: str, infinite: float) -> None:
    """It makes bounds NaN, which must not hide the bounds of other rows."""
    weight = gaussian(1000, 64)
    for _ in range(20):
        bias = torch.randn(1000) * 0.1
        bias[torch.rand(1000) < 0.5] = infinite
        check(weight, torch.randn(3, 64), bias)
    check(weight, torch.randn(3, 64), torch.full((1000,), infinite))


def test_more_columns_than_sums_of_32_bits_hold(isa: str) -> None:
    columns = 532608  # 2^24 steps for all of them are 31.5 each, which rounds up
    weight = torch.ones(33, columns, dtype=torch.bfloat16)
    weight[32] = 0
    check(weight, torch.ones(1, columns))


def test_equal_results_are_all_exact(isa: str) -> None:
    weight = gaussian(400, 128)
    x = torch.randn(2, 128)
    best = int(CompactBf16(weight).linear(x[:1]).argmax())
    weight[7], weight[399] = weight[best], weight[best]
    got = CompactBf16(weight).largest(x[:1], None, Screening(weight))[0]
    assert torch.where(got == got.max())[0].tolist() == sorted({7, best, 399})
    check(torch.zeros(70, 32, dtype=torch.bfloat16), x[:, :32])
    check(weight, torch.zeros(3, 128))


def test_exceptions_count(isa: str) -> None:
    weight = ordinary(70, 576)
    weight[3, 5], weight[69, 575], weight[69, 0] = 1e-8, -3e4, 2e9
    assert CompactBf16(weight).columns.numel() == 3
    check(weight, torch.randn(4, 576))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e32])
def test_inputs_that_bounds_cannot_be_found_for(isa: str, value: float) -> None:
    weight, x = gaussian(100, 64), torch.randn(3, 64)
    x[1, 5] = value
    compact = CompactBf16(weight)
    expected, got = compact.linear(x), compact.largest(x, None, Screening(weight))
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


def test_what_cannot_be_screened_is_refused() -> None:
    weight = gaussian(100, 64)
    weight[99, 3] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        Screening(weight)
    weight[99, 3] = 0
    compact, screening = CompactBf16(weight), Screening(weight)
    assert bits(compact.expanded()).equal(bits(weight))
    with pytest.raises(ValueError, match="end in 64"):
        compact.largest(torch.randn(2, 32), None, screening)
