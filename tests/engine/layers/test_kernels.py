"""The pointwise launches of written layers against float64, with fresh inputs and poisoned outputs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from server.engine.runtime.attention.rotary import RotaryEmbedding

pytestmark = pytest.mark.gpu
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
DTYPES = list(ROUNDING)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """New tensors hold NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def check(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Within a few roundings of each element."""
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=4 * ROUNDING[dtype], atol=2 * ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 2880, 5120, 16384])
@pytest.mark.parametrize(("tokens", "offset", "adds"), [(1, 0.0, False), (7, 1.0, True), (300, 0.0, True)])
def test_rms_norm(dtype: torch.dtype, width: int, tokens: int, offset: float, adds: bool) -> None:
    from server.engine.runtime.layers.kernels import rms_norm

    x, residual = random(tokens, width + 8, dtype=dtype)[:, :width], random(tokens, width, dtype=dtype)
    weight = random(width, dtype=dtype)
    x[0] *= 1e-4
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() + offset)
    found = rms_norm(x, weight, 1e-6, offset, residual if adds else None)
    check(found, expected + residual.double() if adds else expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 2048), (300, 2880)])
def test_add(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    from server.engine.runtime.layers.kernels import add

    x, y = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
    check(add(x, y), x.double() + y.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width", "adds"), [(1, 64, True), (7, 2048, False), (300, 2880, True)])
def test_add_gated(dtype: torch.dtype, tokens: int, width: int, adds: bool) -> None:
    from server.engine.runtime.layers.kernels import add_gated

    x, z, y, residual = (random(tokens, width + 8, dtype=dtype)[:, :width] for _ in range(4))
    weight = random(width, dtype=dtype) / width**0.5
    expected = y.double() + torch.sigmoid(x.double() @ weight.double())[:, None] * z.double()
    found = add_gated(x, weight, z, y, residual if adds else None)
    check(found, expected + residual.double() if adds else expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 3, 24), (7, 24, 256), (300, 16, 128)])
def test_gate_heads(dtype: torch.dtype, tokens: int, heads: int, dim: int) -> None:
    from server.engine.runtime.layers.kernels import gate_heads

    x, gate = random(tokens, heads, dim, dtype=dtype), random(tokens, heads, 2 * dim, dtype=dtype)[..., dim:]
    check(gate_heads(x, gate), x.double() * torch.sigmoid(gate.double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 64), (5, 1100), (129, 14336)])
def test_gated(dtype: torch.dtype, activation: str, tokens: int, columns: int) -> None:
    from server.engine.runtime.layers.kernels import gated

    gate_up = random(tokens, 2 * columns, dtype=dtype)
    gate_up[0, :8] *= 30  # where exponentials overflow
    gate, up = gate_up.double().chunk(2, -1)
    functional = torch.nn.functional
    wide = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    check(gated(gate_up, activation), wide * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "columns"),
    [(32, 8, 128, 128), (1, 1, 64, 64), (5, 5, 96, 96), (28, 4, 128, 64), (8, 2, 80, 32), (4, 1, 256, 256)],
)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("tokens", "angle_step"), [(1, 0), (37, 0), (37, 1), (37, 2)])
def test_rotate(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, columns: int, norms: bool, tokens: int, angle_step: int
) -> None:
    from server.engine.runtime.attention.kernels.rotate import rotate

    joined = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    query, key, _ = joined.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    query, key = query.unflatten(-1, (heads, dim)), key.unflatten(-1, (kv_heads, dim))
    angles = torch.rand(tokens, columns, device="cuda").double() * 100
    weights = (random(dim, dtype=dtype), random(dim, dtype=dtype)) if norms else None
    offset = 1.0 if norms else 0.0
    rotary = RotaryEmbedding(angles.cos().to(dtype), angles.sin().to(dtype), weights, 1e-5, offset, angle_step)
    found = rotate(rotary, query, key)
    for x, weight, result in zip((query, key), weights or (None, None), found, strict=True):
        wide = x.double()
        if weight is not None:
            wide = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + 1)
        turned, rest = wide[..., :columns], wide[..., columns:]
        cos, sin = rotary.cos.double()[:, None], rotary.sin.double()[:, None]
        if angle_step == 0:
            first, second = turned.chunk(2, -1)
            turned = turned * cos + torch.cat((-second, first), -1) * sin
        else:
            angle = torch.arange(columns // 2, device="cuda").repeat_interleave(2) * angle_step
            across = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
            turned = turned * cos[..., angle] + across * sin[..., angle]
        assert result.is_contiguous()
        check(result, torch.cat((turned, rest), -1), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [16, 48, 64])
def test_angles(dtype: torch.dtype, half: int) -> None:
    from server.engine.runtime.layers.kernels import angles

    positions = torch.tensor([0, 1, 1023, 8191, 131071, 1000003], device="cuda")
    frequencies = 1.0 / 500000.0 ** (torch.arange(half, device="cuda").float() / half)
    # As transformers computes them: the product is rounded to float32.
    expected = (positions[:, None].float() * frequencies).double().repeat(1, 2)
    cos, sin = angles(positions, frequencies, 1.25, dtype)
    check(cos, expected.cos() * 1.25, dtype)
    check(sin, expected.sin() * 1.25, dtype)
