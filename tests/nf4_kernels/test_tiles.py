"""Activations in linear_wgmma's order: its definition, products of them, gated activations that come in it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from nf4_kernels import cuda, cuda_launches, ops, reference
from nf4_kernels.params import ACTIVATIONS
from nf4_kernels.plan import WGMMA_INSTANCES, Wgmma
from tests.nf4_kernels.cuda_weights import DEVICE, HOPPER, Random, cut, gpu, random_weight, relative_error
from tests.nf4_kernels.weights import quantized

SIXTEEN_BIT = [torch.bfloat16, torch.float16]


def activated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """The gated activation in float64."""
    gate, up = gate_up.double().chunk(2, -1)
    return (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up


@pytest.mark.parametrize(("rows", "k", "tile"), [(1, 64, 16), (21, 320, 16), (64, 256, 64), (33, 4160, 32)])
def test_the_order(rows: int, k: int, tile: int) -> None:
    x = torch.randn(rows, k, dtype=torch.bfloat16)
    tiles = reference.arrange(x, tile)
    count, blocks = -(-rows // tile), -(-k // 256) * 4
    assert tiles.shape == (count, blocks, tile, 64)
    assert torch.equal(reference.arranged_rows(tiles, rows, k), x)
    for row, column in zip(torch.randint(rows, (50,)).tolist(), torch.randint(k, (50,)).tolist(), strict=True):
        word = column % 64 // 2
        place = (word % 8 ^ row % tile % 8) * 8 + word // 8 * 2 + column % 2
        assert tiles[row // tile, column // 64, row % tile, place] == x[row, column]
    padded = reference.arranged_rows(tiles, count * tile, blocks * 64)
    assert not padded[rows:].any()
    assert not padded[:, k:].any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_product_of_a_gated_activation(activation: str) -> None:
    q = quantized((48, 192), 64, True, seed=1)
    weight = q.packed, [48, 192], q.weight.absmax, 64
    gate_up, residual, bias = torch.randn(5, 384), torch.randn(5, 48), torch.randn(48)
    tiles = torch.ops.nf4.gated_tiles(gate_up, 16, activation)
    x = activated(gate_up, activation).float()
    assert torch.allclose(reference.arranged_rows(tiles, 5, 192), x, atol=1e-6)
    expected = torch.ops.nf4.fused_linear(x, *weight, bias, *q.nested, residual)
    found = torch.ops.nf4.arranged_linear(tiles, 5, *weight, bias, *q.nested, residual)
    assert torch.allclose(found, expected, atol=1e-4)
    torch.library.opcheck(torch.ops.nf4.gated_tiles.default, (gate_up, 16, activation))
    arguments = tiles, 5, *weight, bias, *q.nested, residual
    torch.library.opcheck(torch.ops.nf4.arranged_linear.default, arguments)


def test_cpus_arrange_nothing() -> None:
    assert ops.tile_rows(torch.device("cpu"), torch.bfloat16, 32, [4096, 4096], 64, True) == 0


def arranged(
    w: Random, tiles: torch.Tensor, rows: int, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    weight = w.packed, (w.n, w.k), w.absmax, w.blocksize
    return cuda.arranged_linear(tiles, rows, *weight, bias, *w.nested, residual)


@gpu
@HOPPER
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize(("tokens", "groups"), WGMMA_INSTANCES)
def test_every_instance(tokens: int, groups: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as from rows, whatever tiles hold beyond them."""
    for n, k, m, blocks, owner_steps in [
        (1000, 4160, tokens, 132, 0),
        (193, 448, 2 * tokens + 1, 5, 0),
        (130, 21504, tokens - 1, 11, 0),
        (1000, 4160, tokens + 1, 2, 10),
    ]:
        choice = cut(tokens, groups, m, n, k, blocks, owner_steps)
        monkeypatch.setattr(cuda_launches, "_plan", lambda *_, choice=choice: choice)
        w = random_weight(n, k)
        x, bias, residual = (torch.randn(shape, device=DEVICE, dtype=dtype) for shape in ((m, k), (n,), (m, n)))
        tiles = reference.arrange(x, tokens)
        beyond = torch.arange(tiles.shape[0] * tokens, device=DEVICE).view(-1, 1, tokens, 1) >= m
        tiles = tiles.masked_fill(beyond, float("nan"))
        for around in ((None, None), (bias, residual)):
            torch.full((m, n), float("nan"), device=DEVICE, dtype=dtype)
            weight = w.packed, (n, k), w.absmax, w.blocksize
            expected = cuda.fused_linear(x, *weight, around[0], *w.nested, around[1])
            assert torch.equal(arranged(w, tiles, m, *around), expected), (str(choice), around[0] is None)


@gpu
@pytest.mark.parametrize("nested", [False, True])
def test_any_tile_and_any_shape(nested: bool) -> None:
    """Where the launch has another tile, or another kernel multiplies, rows are put in order first."""
    for n, k in ((1, 64), (63, 192), (1000, 4160), (5120, 5120)):
        w = random_weight(n, k, 64, nested)
        for m in (1, 8, 17, 32, 100, 300):
            x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
            own = cuda.tile_rows(DEVICE, x.dtype, m, (n, k), 64, nested)
            choice = cuda.plan_on(DEVICE, m, n, k, 64, nested)
            assert own == (choice.tokens if isinstance(choice, Wgmma) else 0)
            for tile in {own, 16, 24} - {0}:
                assert torch.equal(arranged(w, reference.arrange(x, tile), m, None, None), w.linear(x)), (n, k, m, tile)


@gpu
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activations(activation: str, dtype: torch.dtype) -> None:
    for rows, k, tile in ((1, 64, 16), (16, 192, 16), (33, 4160, 32), (48, 12288, 64), (129, 1024, 128)):
        gate_up = torch.randn(rows, 2 * k, device=DEVICE) * 10 ** torch.linspace(-2, 1.5, rows, device=DEVICE)[:, None]
        gate_up = gate_up.to(dtype)
        shape = -(-rows // tile), -(-k // 256) * 4, tile, 64
        torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)
        tiles = cuda.gated_tiles(gate_up, tile, activation)
        assert tiles.shape == shape
        whole = reference.arranged_rows(tiles, shape[0] * tile, shape[1] * 64)
        assert not whole[rows:].any()
        assert not whole[:, k:].any()
        exact = activated(gate_up, activation)
        usual = relative_error(reference.gated(gate_up, activation), exact)
        assert relative_error(whole[:rows, :k], exact) < 1.05 * usual + 1e-5, (rows, k, tile)


@gpu
def test_gates_that_are_not_small() -> None:
    ends = torch.tensor([-1e4, -100, -88, -20, 0, 20, 88, 100, 1e4], device=DEVICE, dtype=torch.bfloat16)
    gate_up = torch.ones(9, 128, device=DEVICE, dtype=torch.bfloat16)
    gate_up[:, :64] = ends[:, None]
    for activation in ACTIVATIONS:
        found = reference.arranged_rows(cuda.gated_tiles(gate_up, 16, activation), 9, 64)
        assert torch.allclose(found, reference.gated(gate_up, activation), rtol=1e-2, atol=1e-8)


@gpu
@pytest.mark.parametrize("m", [16, 32, 64, 100])
def test_layers_in_a_graph(m: int) -> None:
    """Launches overlap: a product's sums are gated and arranged, multiplied again, and so on."""
    layers = [[random_weight(n, k) for n, k in [(12288, 4096), (4096, 6144)]] for _ in range(3)]
    x = torch.randn(m, 4096, device=DEVICE, dtype=torch.bfloat16)
    tile = cuda.tile_rows(DEVICE, x.dtype, m, (4096, 6144), 64, True) or 16

    def run(of_tiles: bool) -> list[torch.Tensor]:
        states = [x]
        for up, down in layers:
            inner = functional.rms_norm(up.linear(states[-1]), (12288,))
            tiles = cuda.gated_tiles(inner, tile, "silu")
            if not of_tiles:
                y = down.linear(reference.arranged_rows(tiles, m, 6144)) + states[-1]
            else:
                y = arranged(down, tiles, m, None, None) + states[-1]
            states += [inner, functional.rms_norm(y, (4096,))]
        return states

    expected = run(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        states = run(True)
    for _ in range(50):
        for state in states[1:]:
            state.fill_(float("nan"))
        graph.replay()
        for found, wanted in zip(states, expected, strict=True):
            assert torch.equal(found, wanted)


@gpu
@HOPPER
def test_a_product_of_tiles_has_its_time() -> None:
    """Which is that of the product of rows, but for the launch that arranges them."""
    w = random_weight(5120, 5120)
    x = torch.randn(32, 5120, device=DEVICE, dtype=torch.bfloat16)
    tiles = reference.arrange(x, cuda.tile_rows(DEVICE, x.dtype, 32, (5120, 5120), 64, True))
    w.linear(x)
    clock, times = cuda.start_clock(DEVICE), [0.0]
    try:
        for of_tiles in (False, True):
            for _ in range(200):
                _ = arranged(w, tiles, 32, None, None) if of_tiles else w.linear(x)
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
    with pytest.raises(ValueError, match="not that of 17 rows"):
        arranged(w, good, 17, None, None)
    with pytest.raises(ValueError, match="tiles must be"):
        arranged(w, good.float(), 16, None, None)
    with pytest.raises(ValueError, match="residual must be"):
        arranged(w, good, 16, None, torch.zeros(64, device=DEVICE, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="gate_up must be"):
        cuda.gated_tiles(torch.zeros(3, 200, device=DEVICE, dtype=torch.bfloat16), 16, "silu")
    with pytest.raises(ValueError, match="relu"):
        cuda.gated_tiles(torch.zeros(3, 256, device=DEVICE, dtype=torch.bfloat16), 16, "relu")
