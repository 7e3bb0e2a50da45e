"""The portable path's GEMMs of many tokens, which go through dequantized rows and torch's GEMM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nf4_kernels import cpu, reference
from tests.nf4_kernels.weights import quantized, using_isa


@pytest.fixture(autouse=True)
def _portable() -> Iterator[None]:
    with using_isa("portable"):
        yield


@pytest.mark.parametrize("elements", [1, 1000, 1 << 20])
@pytest.mark.parametrize(("n", "k"), [(96, 128), (33, 65), (1, 64)])
@pytest.mark.parametrize("nested", [False, True])
def test_pieces_of_a_weight_make_the_whole(
    monkeypatch: pytest.MonkeyPatch, elements: int, n: int, k: int, nested: bool
) -> None:
    monkeypatch.setattr(cpu, "_DEQUANTIZED_ELEMENTS", elements)
    q = quantized((n, k), 64, nested, seed=n)
    for tokens in (cpu.DEQUANTIZED_FROM, 40):
        x, bias = torch.randn(tokens, k), torch.randn(n)
        exact = reference.linear(x.double().float(), q.weight, bias).double()
        assert float((cpu.linear(x, q.weight, bias) - exact).norm() / exact.norm()) <= 1e-6
        for dtype in (torch.bfloat16, torch.float16):
            got = cpu.linear(x.to(dtype), q.weight, bias.to(dtype))
            assert got.dtype is dtype
            expected = reference.linear(x.to(dtype).float(), q.weight, bias.to(dtype).float()).to(dtype)
            # The same sums but for the order of additions, rounded once.
            assert float((got.float() - expected.float()).norm() / expected.float().norm()) <= 1e-3


def test_few_and_many_tokens_agree() -> None:
    q = quantized((576, 576), 64, True, seed=4)
    x = torch.randn(2, cpu.DEQUANTIZED_FROM, 576)
    together = cpu.linear(x, q.weight)
    assert together.shape == (2, cpu.DEQUANTIZED_FROM, 576)
    alone = torch.cat([cpu.linear(row, q.weight) for row in x.flatten(0, 1).split(1)]).view_as(together)
    assert torch.allclose(together, alone, rtol=0, atol=1e-5 * float(alone.abs().max()))


def test_its_time_counts_as_linear_and_in_part_as_dequantizing() -> None:
    q = quantized((576, 576), 64, True, seed=4)
    before = cpu.clock()
    cpu.linear(torch.randn(64, 576), q.weight)
    dequantizing, linear = (now - then for now, then in zip(cpu.clock(), before, strict=True))
    assert 0 < dequantizing < linear
