"""The C++ between GEMMs and attention on CPU against float64, with fresh inputs and poisoned outputs."""

from __future__ import annotations

import pytest
import torch

from server.engine.runtime import pointwise
from server.engine.runtime.attention.rotary import RotaryEmbedding


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("width", [1, 63, 576, 5120])
@pytest.mark.parametrize(("tokens", "offset", "adds"), [(1, 0.0, False), (7, 1.0, True), (80, 0.0, True)])
def test_norm(width: int, tokens: int, offset: float, adds: bool) -> None:
    x, weight = torch.randn(tokens, width + 3)[:, :width], torch.randn(width)
    addend, residual = torch.randn(tokens, width), torch.randn(tokens, width)
    x[0] *= 1e-4
    before, out = x.double(), poisoned(tokens, width)
    pointwise.norm(x, weight, 1e-6, offset, out, residual if adds else None, addend if adds else None).make()
    wide = before + addend.double() if adds else before
    check(x, wide)
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() + offset)
    check(out, expected + residual.double() if adds else expected)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "columns"), [(9, 3, 64, 64), (1, 1, 16, 8), (32, 8, 128, 128), (5, 5, 96, 32)]
)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("tokens", [1, 37])
def test_rotate(heads: int, kv_heads: int, dim: int, columns: int, norms: bool, tokens: int) -> None:
    joined = torch.randn(tokens, (heads + kv_heads) * dim)
    query, key = joined.split([heads * dim, kv_heads * dim], -1)
    query, key = query.unflatten(-1, (heads, dim)), key.unflatten(-1, (kv_heads, dim))
    angles = torch.rand(tokens, columns) * 100
    weights = (torch.randn(dim), torch.randn(dim)) if norms else None
    rotary = RotaryEmbedding(angles.cos(), angles.sin(), weights, 1e-5, 1.0 if norms else 0.0)
    wide = RotaryEmbedding(rotary.cos.double(), rotary.sin.double(), weights, rotary.eps, rotary.offset)
    expected = [x.double() for x in wide.apply(query.clone(), key.clone())]
    for found, wanted in zip(rotary.rotate(query, key), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", pointwise.ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "columns"), [(1, 1), (5, 1536), (129, 300)])
def test_gate(activation: str, tokens: int, columns: int) -> None:
    gate_up, out = torch.randn(tokens, 2 * columns), poisoned(tokens, columns)
    gate_up[0, :1] = -200.0  # where an exponential overflows
    gate, up = gate_up.double().chunk(2, -1)
    pointwise.gate(gate_up, activation, out).make()
    functional = torch.nn.functional
    wide = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    check(out, wide * up)


def test_angles() -> None:
    positions = torch.tensor([0, 1, 1023, 8191, 131071])
    frequencies = 1.0 / 10000.0 ** (torch.arange(33) / 33.0)
    cos, sin = poisoned(5, 66), poisoned(5, 66)
    pointwise.angles(positions, frequencies, 1.5, cos, sin).make()
    wide = (positions[:, None].float() * frequencies).double().repeat(1, 2)
    check(cos, wide.cos() * 1.5)
    check(sin, wide.sin() * 1.5)


def test_only_float32_on_cpu_is_taken() -> None:
    assert pointwise.computes(torch.zeros(2, 3))
    assert not pointwise.computes(torch.zeros(2, 3), torch.zeros(3, dtype=torch.bfloat16))
    assert not pointwise.computes(torch.zeros(3, 2).t())
