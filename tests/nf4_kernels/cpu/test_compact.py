"""Compact bfloat16: nothing is lost, and GEMMs with it are those with the plain weight."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nf4_kernels import cpu
from nf4_kernels.cpu.compact import CompactBf16
from tests.nf4_kernels.weights import using_isa


@pytest.fixture(params=cpu.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that this CPU has, in turn."""
    with using_isa(request.param):
        yield request.param


def bits(weight: torch.Tensor) -> torch.Tensor:
    """The numbers of a bfloat16 tensor as integers, to tell -0 from 0 and one NaN from another."""
    return weight.view(torch.int16)


def ordinary(n: int, k: int) -> torch.Tensor:
    """bfloat16 [n, k] with 15 high bytes: seven pairs of exponents with both signs, and one more; zero has the 16th code."""
    generator = torch.Generator().manual_seed(n + k)
    sizes = 2 ** (torch.rand(n, k, generator=generator) * 13.9 - 13)
    sizes *= torch.randint(0, 2, (n, k), generator=generator) * 2 - 1
    sizes[:, :8] = 2**-14
    return sizes.to(torch.bfloat16)


def test_every_number_is_kept() -> None:
    weight = ordinary(300, 320)
    special = [0.0, -0.0, 1e-40, 3e38, -3e38, float("inf"), -float("inf"), float("nan"), 1e-9, -1e-20]
    weight.view(-1)[: len(special)] = torch.tensor(special).to(torch.bfloat16)
    compact = CompactBf16(weight)
    assert compact.columns.numel() == len(special) - 2  # 0 and 1e-40 have codes
    assert torch.equal(bits(compact.expanded()), bits(weight))
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    rare = torch.cat([ordinary(7000, 1024).view(-1), every]).view(-1, 1024)
    compact = CompactBf16(rare)
    assert compact.columns.numel() >= 2**16 - 16 * 256
    assert torch.equal(bits(compact.expanded()), bits(rare))


@pytest.mark.parametrize(("n", "k"), [(1, 32), (33, 64), (100, 576), (7, 4096)])
def test_linear_is_that_with_the_plain_weight(isa: str, n: int, k: int) -> None:
    weight, bias = ordinary(n, k), torch.randn(n)
    compact = CompactBf16(weight)
    assert compact.columns.numel() == 0
    for rows in (1, 2, 3, 4, 5, 8, 49, 130):
        x = torch.randn(rows, k)
        for given in (None, bias):
            expected, got = cpu.linear_bf16w(x, weight, given), compact.linear(x, given)
            exact = x.double() @ weight.double().T + (0 if given is None else given.double())
            # A sum of few outputs may be much smaller than what is added up.
            added = x.abs().double() @ weight.abs().double().T + (0 if given is None else given.abs().double())
            assert float((got - exact).norm() / added.norm()) <= 1e-6
            if isa in ("avx2", "avx512", "avx512vnni"):
                assert torch.equal(got, expected), rows


def test_exceptions_are_multiplied(isa: str) -> None:
    weight = ordinary(70, 576)
    weight[3, 5], weight[69, 575], weight[69, 0] = 1e-8, -3e4, 2e9
    compact = CompactBf16(weight)
    assert compact.columns.numel() == 3
    x = torch.randn(2, 50, 576)
    exact = x.double() @ weight.double().T
    got = compact.linear(x)
    assert float((got - exact).norm() / exact.norm()) <= 1e-6
    assert float((got - exact)[..., :69].norm() / exact[..., :69].norm()) <= 1e-6
    assert compact.linear(x[:0]).shape == (0, 50, 70)


def test_what_does_not_fit_is_refused() -> None:
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(64, 64, generator=generator) * 10 ** (torch.rand(64, 64, generator=generator) * 30 - 15)
    with pytest.raises(ValueError, match="high bytes"):
        CompactBf16(wide.to(torch.bfloat16))
    with pytest.raises(ValueError, match="multiple of 32"):
        CompactBf16(torch.zeros(4, 40, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="float32"):
        CompactBf16(torch.zeros(4, 64))
    compact = CompactBf16(ordinary(4, 64))
    with pytest.raises(ValueError, match="end in 64"):
        compact.linear(torch.randn(2, 32))
    with pytest.raises(ValueError, match="bias"):
        compact.linear(torch.randn(2, 64), torch.randn(5))
