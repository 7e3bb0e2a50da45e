"""The portable instruction set: its own GEMM of few tokens, and that of more through dequantized rows and torch's."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from nf4_kernels import Weight, cpu, reference
from tests.nf4_kernels.weights import quantized, using_isa

SHAPES = [(96, 128), (33, 65), (1, 64), (17, 1), (40, 196), (100, 4160)]
TOKENS = (1, 2, 3, 7, cpu.DEQUANTIZED_FROM - 1, cpu.DEQUANTIZED_FROM, 37, 100)


@pytest.fixture(autouse=True)
def _portable() -> Iterator[None]:
    with using_isa("portable"):
        yield


def is_rounded_once(found: torch.Tensor, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> bool:
    """Whether results are as near to float64's as their dtype allows, but for 1.9e-6 that sums in float32 may be off.

    The 1.9e-6 are relative to the results' norm, or to that of sums with random signs if this is larger. A fixed bound for
    16 bits would fail by chance: few results may all be rounded by half of their last place.
    """
    expanded = reference.dequantize(weight, torch.float32).double()
    wide = x.detach().double()
    right = wide @ expanded.T + (0 if bias is None else bias.detach().double())
    random = float(wide.norm() * expanded.norm()) / x.shape[-1] ** 0.5
    rounding = float((right.to(found.dtype).double() - right).norm())
    return float((found.double() - right).norm()) <= rounding + 1.9e-6 * max(float(right.norm()), random)


@pytest.mark.parametrize("elements", [1, 1000, 1 << 20])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("nested", [False, True])
def test_results_are_those_of_float64(
    monkeypatch: pytest.MonkeyPatch, elements: int, n: int, k: int, nested: bool
) -> None:
    monkeypatch.setattr(cpu, "_DEQUANTIZED_ELEMENTS", elements)
    q = quantized((n, k), 64, nested, seed=n)
    for tokens in TOKENS:
        x, bias = torch.randn(tokens, k), torch.randn(n)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for given in (None, bias.to(dtype)):
                found = cpu.linear(x.to(dtype), q.weight, given)
                assert found.dtype is dtype
                assert is_rounded_once(found, x.to(dtype), q.weight, given), (tokens, dtype)


@pytest.mark.parametrize("bias", [False, True])
def test_what_was_in_the_result_s_memory_does_not_count(bias: bool) -> None:
    q = quantized((100, 320), 64, True, seed=1)
    layer = cpu.PreparedLinear(q.weight, torch.randn(100) if bias else None)
    for tokens in TOKENS:
        for dtype in (torch.float32, torch.bfloat16):
            if bias and dtype is not torch.float32:
                continue
            x, found = torch.randn(tokens, 320).to(dtype), torch.full((tokens, 100), float("nan"), dtype=dtype)
            if tokens >= cpu.DEQUANTIZED_FROM:
                layer._multiply_dequantized(x, found)
            else:
                address, (*pointers, rows, number, threads) = layer.call_of(x, found)
                call = ctypes.CFUNCTYPE(
                    ctypes.c_int, *[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32
                )
                assert call(address)(*pointers, rows, number, threads) == 0
            assert is_rounded_once(found, x, q.weight, layer.bias)


@pytest.mark.parametrize("table", ["nf4", "fp4"])
def test_rows_are_dequantized_bit_for_bit(monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    """A product with a row of the unit matrix is a column of the weight, in which nothing is rounded."""
    monkeypatch.setattr(cpu, "_DEQUANTIZED_ELEMENTS", 1000)
    for n, k in ((70, 64), (33, 65), (19, 130)):
        q = quantized((n, k), 64, True, seed=k, table=table)
        expanded = reference.dequantize(q.weight, torch.float32)
        for tokens in (5, k):
            assert torch.equal(cpu.linear(torch.eye(k)[:tokens], q.weight), expanded.T[:tokens])


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_few_tokens_have_the_bits_that_each_has_alone(n: int, k: int) -> None:
    q = quantized((n, k), 64, True, seed=4)
    x = torch.randn(cpu.DEQUANTIZED_FROM - 1, k)
    alone = torch.cat([cpu.linear(row, q.weight) for row in x.split(1)])
    for tokens in range(2, cpu.DEQUANTIZED_FROM):
        assert torch.equal(cpu.linear(x[:tokens], q.weight), alone[:tokens])


def test_few_and_many_tokens_agree() -> None:
    q = quantized((576, 576), 64, True, seed=4)
    x = torch.randn(2, cpu.DEQUANTIZED_FROM, 576)
    together = cpu.linear(x, q.weight)
    assert together.shape == (2, cpu.DEQUANTIZED_FROM, 576)
    alone = torch.cat([cpu.linear(row, q.weight) for row in x.flatten(0, 1).split(1)]).view_as(together)
    assert torch.allclose(together, alone, rtol=0, atol=1e-5 * float(alone.abs().max()))


def test_gradients_of_arguments_are_not_followed() -> None:
    q = quantized((40, 64), 64, True, seed=4)
    bias = torch.nn.Parameter(torch.randn(40))
    for tokens in (3, 40):
        x = torch.randn(tokens, 64, requires_grad=True)
        found = cpu.linear(x, q.weight, bias)
        assert not found.requires_grad
        assert is_rounded_once(found, x, q.weight, bias)


def test_pieces_are_of_one_size_and_bounded() -> None:
    for n, k in ((3072, 576), (11008, 4096), (4097, 4096), (5, 3), (33, 1 << 21)):
        rows = cpu._dequantized_rows(n, k)
        assert rows * k <= cpu._DEQUANTIZED_ELEMENTS + 16 * k
        last = n % rows or rows
        assert last == n or rows - last <= 16 * -(-n // rows)


def test_the_environment_forces_it() -> None:
    code = """
import torch
from nf4_kernels import Weight, cpu, reference
weight = Weight(torch.randint(256, (96 * 96,), dtype=torch.uint8), (96, 192), torch.rand(96 * 3), 64)
expanded = reference.dequantize(weight, torch.float32).double()
for tokens in (1, cpu.DEQUANTIZED_FROM, 100):
    x = torch.randn(tokens, 192)
    right = x.double() @ expanded.T
    assert float((cpu.linear(x, weight) - right).norm() / right.norm()) <= 2e-6
print(cpu.isa())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NF4_CPU_ISA": "portable"},
    )
    assert done.stdout.split() == ["portable"], done.stderr


def test_its_time_counts_as_linear_and_in_part_as_dequantizing() -> None:
    q = quantized((576, 576), 64, True, seed=4)
    before = cpu.clock()
    cpu.linear(torch.randn(64, 576), q.weight)
    dequantizing, linear = (now - then for now, then in zip(cpu.clock(), before, strict=True))
    assert 0 < dequantizing < linear
