"""Tiled activations: their order, and GEMMs of them."""

from __future__ import annotations

import pytest
import torch

from nf4_kernels import cuda, ops, reference
from nf4_kernels.cuda import launches
from nf4_kernels.plan import WGMMA_INSTANCES, Wgmma
from tests.nf4_kernels.cuda.cuda_weights import DEVICE, HOPPER, Random, gpu, random_weight, split
from tests.nf4_kernels.weights import quantized

SIXTEEN_BIT = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("rows", "k", "tile"), [(1, 64, 16), (21, 320, 16), (64, 256, 64), (33, 4160, 32), (200, 320, 96)]
)
def test_the_order(rows: int, k: int, tile: int) -> None:
    x = torch.randn(rows, k, dtype=torch.bfloat16)
    tiles = reference.tile_activations(x, tile)
    count, blocks = -(-rows // tile), -(-k // 256) * 4
    assert tiles.shape == (count, blocks, tile, 64)
    assert torch.equal(reference.untile_activations(tiles, rows, k), x)
    for row, column in zip(torch.randint(rows, (50,)).tolist(), torch.randint(k, (50,)).tolist(), strict=True):
        word = column % 64 // 2
        place = (word % 8 ^ row % tile % 8) * 8 + word // 8 * 2 + column % 2
        assert tiles[row // tile, column // 64, row % tile, place] == x[row, column]
    padded = reference.untile_activations(tiles, count * tile, blocks * 64)
    assert not padded[rows:].any()
    assert not padded[:, k:].any()


def test_a_gemm_of_tiles() -> None:
    q = quantized((48, 192), 64, True, seed=1)
    x, residual, bias = torch.randn(5, 192), torch.randn(5, 48), torch.randn(48)
    found = ops.tiled_linear(reference.tile_activations(x, 16), q.weight, 5, bias, residual)
    assert torch.allclose(found, ops.fused_linear(x, q.weight, bias, residual), atol=1e-4)


def test_cpus_have_no_tile() -> None:
    assert ops.token_tile(torch.device("cpu"), torch.bfloat16, 32, [4096, 4096], 64, True) == 0


def tiled_linear(
    w: Random, tiles: torch.Tensor, tokens: int, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    return cuda.tiled_linear(tiles, tokens, w.weight, bias, residual)


@gpu
@HOPPER
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize(("tokens", "groups"), WGMMA_INSTANCES)
def test_every_instance(tokens: int, groups: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as from x itself, whatever tiles hold beyond its tokens."""
    for n, k, m, blocks, first_steps in [
        (1000, 4160, tokens, 132, 0),
        (193, 448, 2 * tokens + 1, 5, 0),
        (130, 21504, tokens - 1, 11, 0),
        (1000, 4160, tokens + 1, 2, 10),
    ]:
        choice = split(tokens, groups, m, n, k, blocks, first_steps)
        monkeypatch.setattr(launches, "_plan", lambda *_, choice=choice: choice)
        w = random_weight(n, k)
        x, bias, residual = (torch.randn(shape, device=DEVICE, dtype=dtype) for shape in ((m, k), (n,), (m, n)))
        tiles = reference.tile_activations(x, tokens)
        beyond = torch.arange(tiles.shape[0] * tokens, device=DEVICE).view(-1, 1, tokens, 1) >= m
        tiles = tiles.masked_fill(beyond, float("nan"))
        for fusion in ((None, None), (bias, residual)):
            torch.full((m, n), float("nan"), device=DEVICE, dtype=dtype)
            expected = cuda.fused_linear(x, w.weight, *fusion)
            assert torch.equal(tiled_linear(w, tiles, m, *fusion), expected), (str(choice), fusion[0] is None)


@gpu
@pytest.mark.parametrize("nested", [False, True])
def test_any_tile_and_any_shape(nested: bool) -> None:
    """If the launch has another tile, or another kernel multiplies, x is put in order first."""
    for n, k in ((1, 64), (63, 192), (1000, 4160), (5120, 5120)):
        w = random_weight(n, k, 64, nested)
        for m in (1, 8, 17, 32, 100, 300):
            x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
            own = cuda.token_tile(DEVICE, x.dtype, m, (n, k), 64, nested)
            choice = cuda.plan_on(DEVICE, m, n, k, 64, nested)
            assert own == (choice.tokens if isinstance(choice, Wgmma) else 0)
            for tile in {own, 16, 24} - {0}:
                assert torch.equal(tiled_linear(w, reference.tile_activations(x, tile), m, None, None), w.linear(x)), (
                    n,
                    k,
                    m,
                    tile,
                )


@gpu
@HOPPER
def test_a_gemm_of_tiles_has_its_time() -> None:
    """The plan is that of the GEMM of x itself, except for the launch that tiles it."""
    w = random_weight(5120, 5120)
    x = torch.randn(32, 5120, device=DEVICE, dtype=torch.bfloat16)
    tiles = reference.tile_activations(x, cuda.token_tile(DEVICE, x.dtype, 32, (5120, 5120), 64, True))
    w.linear(x)
    clock, times = cuda.start_clock(DEVICE), [0.0]
    try:
        for of_tiles in (False, True):
            for _ in range(200):
                _ = tiled_linear(w, tiles, 32, None, None) if of_tiles else w.linear(x)
            clock.collect()
            clock.note(clock.totals)
            times.append(clock.seconds()["wgmma"])
    finally:
        cuda.stop_clock(DEVICE)
    assert 0.5 < (times[2] - times[1]) / times[1] < 1.0


@gpu
def test_what_is_wrong_is_named() -> None:
    w = random_weight(64, 256)
    good = torch.zeros(1, 4, 16, 64, device=DEVICE, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="not that of 17 tokens"):
        tiled_linear(w, good, 17, None, None)
    with pytest.raises(ValueError, match="tiles must be"):
        tiled_linear(w, good.float(), 16, None, None)
    with pytest.raises(ValueError, match="residual must be"):
        tiled_linear(w, good, 16, None, torch.zeros(64, device=DEVICE, dtype=torch.bfloat16))
