"""GEMMs that give activation(gate) * up of their halves, tiled or not: in their own launches where these have it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional

from nf4_kernels import Weight, cuda, ops, reference
from nf4_kernels.cuda import launches
from nf4_kernels.params import ACTIVATIONS
from nf4_kernels.plan import NORM_K, WGMMA_INSTANCES, Mma, Rows, Wgmma, rows_candidates
from tests.nf4_kernels.cuda.cuda_weights import DEVICE, HOPPER, Random, gpu, random_weight, split
from tests.nf4_kernels.weights import is_close, quantized

EPS = 1e-4
BFLOAT16 = torch.bfloat16
SIXTEEN_BIT = [torch.bfloat16, torch.float16]
Maybe = torch.Tensor | None


def activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """The result in float64."""
    return (
        functional.silu(gate.double()) if activation == "silu" else functional.gelu(gate.double(), approximate="tanh")
    )


def gated(w: Random, x: torch.Tensor, bias: Maybe, norm_weight: Maybe, activation: str, tile: int = 0) -> torch.Tensor:
    """The gated activation, written to poisoned memory."""
    columns, rows = w.n // 2, x.shape[:-1]
    shape = reference.tiles_shape(rows.numel(), columns, tile) if tile else (*rows, columns)
    torch.full(shape, float("nan"), device=x.device, dtype=x.dtype)
    out = cuda.gated_linear(x, w.weight, bias, norm_weight, EPS, activation, tile)
    assert out.shape == shape
    assert out.dtype == x.dtype
    return out


def fused(
    w: Random, x: torch.Tensor, bias: Maybe = None, residual: Maybe = None, norm_weight: Maybe = None
) -> torch.Tensor:
    return cuda.fused_linear(x, w.weight, bias, residual, norm_weight, EPS)


def rows_of(tiles: torch.Tensor, m: int, columns: int) -> torch.Tensor:
    """The rows in tiles; beyond their columns are zeros, beyond the rows may be anything."""
    whole = reference.untile_activations(tiles, m, tiles.shape[1] * 64)
    assert not whole[:, columns:].any()
    return whole[:, :columns]


def is_right(found: torch.Tensor, gate_up: torch.Tensor, activation: str, same_sums: bool) -> bool:
    """Whether found is activation(gate) * up of the rounded sums, each rounded, but for how exactly exp is computed.

    Not same_sums: a GEMM may add up in another order, so that some sums are rounded to a neighbour.
    """
    gate, up = (half.double() for half in gate_up.chunk(2, -1))
    bent, eps, slack = activated(gate, activation), torch.finfo(found.dtype).eps, 1e-5
    exact = bent * up
    # Small ones: of float16, which has no smaller ones, and 1 + tanh() of torch's GELU, where few digits are left below -3.
    allowed = 1.3 * eps * exact.abs() + 1e-7 * (1 + gate.abs()) * (1 + up.abs())
    if not same_sums:
        swing = [(activated(gate * (1 + step), activation) - bent).abs() for step in (eps, -eps)]
        near_zero = 1e-5 * gate_up.double().abs().amax(-1, keepdim=True)
        allowed += 1.3 * eps * exact.abs() + torch.maximum(*swing) * up.abs() + near_zero * (up.abs() + bent.abs())
        slack += eps * (1 / 8 + 64 / found.numel())
    others = (found != bent.to(found.dtype) * up.to(found.dtype))[gate > -3]
    errors, usual = (x.double() - exact for x in (found, reference.gated(gate_up, activation)))
    as_usual = errors.norm() <= 1.05 * usual.norm() + slack * exact.norm() + 1e-9 * gate_up.double().norm()
    return bool(as_usual) and bool((errors.abs() <= allowed).all()) and int(others.sum()) <= 3 + others.numel() // 20


def sums(w: Random, x: torch.Tensor, bias: Maybe, norm_weight: Maybe) -> torch.Tensor:
    """The GEMM's result by the launch that gates, if one does: others may normalise in another order."""
    nested, normalised = w.weight.absmax_8bit is not None, norm_weight is not None
    gates = cuda.can_gate(DEVICE, x.dtype, x.shape[0], (w.n, w.k), w.weight.blocksize, nested, normalised)
    with patch.object(launches, "plan_on", partial(launches.plan_on, gated=gates)):
        return fused(w, x, bias, norm_weight=norm_weight)


def check(
    w: Random,
    m: int,
    what: object,
    dtype: torch.dtype = BFLOAT16,
    tiles: Sequence[int] = (),
    same_sums: bool = True,
    plain: bool = True,
) -> None:
    """Both activations, with and without bias and (with plain) without norm, twice the same bits, and in tiles."""
    # Sums from 0.03 to some tens, of normalised rows of about 3.
    length = float(w.exact().norm()) / w.n**0.5
    sizes = 10 ** torch.linspace(1, -1.5, m, device=DEVICE)[torch.randperm(m, device=DEVICE)]
    x = (torch.randn(m, w.k, device=DEVICE) * sizes[:, None] / length).to(dtype)
    bias = torch.randn(w.n, device=DEVICE, dtype=dtype)
    norm_weight = (torch.randn(w.k, device=DEVICE) * 3 / length).to(dtype)
    normed = [None] * plain + [norm_weight] * (dtype == BFLOAT16)
    for more, norm, activation in itertools.product((None, bias), normed, ACTIVATIONS):
        case = str(what), m, more is not None, norm is not None, activation
        gate_up = sums(w, x, more, norm)
        rows = gated(w, x, more, norm, activation)
        assert is_right(rows, gate_up, activation, same_sums), case
        assert torch.equal(gated(w, x, more, norm, activation), rows), case
        for tile in tiles:
            assert torch.equal(rows_of(gated(w, x, more, norm, activation, tile), m, w.n // 2), rows), (case, tile)


@pytest.fixture
def in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch's operations might be what is right."""
    monkeypatch.setattr(cuda, "gated", None)


@gpu
@HOPPER
@pytest.mark.usefixtures("in_one_launch")
@pytest.mark.parametrize(("tokens", "groups"), WGMMA_INSTANCES)
@pytest.mark.parametrize("nested", [False, True])
def test_every_instance(nested: bool, tokens: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for n, k, m, blocks, first_steps in [
        (1024, 4160, tokens, 132, 0),
        (1008, 4160, tokens + 1, 2, 10),
        (208, 448, 2 * tokens + 1, 5, 0),
        (144, NORM_K, tokens - 1, 11, 0),
        (512, 768, tokens + 3, 1, 0),
        (1024, 256, 2 * tokens, 132, 0),
    ]:
        choice = split(tokens, groups, m, n, k, blocks, first_steps)
        monkeypatch.setattr(launches, "_plan", lambda *_, choice=choice: choice)
        whole = -(-n // (groups * 64)) * -(-m // tokens) % choice.grid == 0
        tiles = {8, 64, 96, tokens} if n % 512 == 0 else ()
        check(random_weight(n, k, 64, nested, offsets=nested), m, choice, BFLOAT16, tuple(tiles), same_sums=whole)


@gpu
@HOPPER
@pytest.mark.usefixtures("in_one_launch")
@pytest.mark.parametrize("nested", [False, True])
def test_every_launch_of_few_tokens(nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose scales begin at multiples of 16 bytes and others, runs of one row group and of many."""
    seen = 0
    for n, k in [(1024, 4096), (208, 448), (16, 5376), (4096, 5120), (512, 14336), (2080, 2880)]:
        w = random_weight(n, k, 64, nested, offsets=nested)
        for multiprocessors in (132, 9):
            for choice in rows_candidates(n, k, 90, multiprocessors, nested):
                if choice.passes > 1:
                    continue  # none of these normalises
                monkeypatch.setattr(launches, "_plan", lambda *_, choice=choice: choice)
                check(w, 8 - seen % 8, choice, tiles=(64,) if n % 512 == 0 else (), plain=False)
                seen += 1
    assert seen > 20


@gpu
def test_which_are_one_launch() -> None:
    for n, k, m, dtype, normalised in itertools.product(
        (16384, 16376), (4096, NORM_K + 64), (1, 8, 32, 300, 4096), (BFLOAT16, torch.float16), (False, True)
    ):
        choice = cuda.plan_on(DEVICE, m, n, k, 64, True, normalised, gated=True)
        has_gate = isinstance(choice, Wgmma | Mma) or (isinstance(choice, Rows) and normalised)
        expected = has_gate and dtype == BFLOAT16 and n % 16 == 0 and not (normalised and k > NORM_K)
        assert cuda.can_gate(DEVICE, dtype, m, (n, k), 64, True, normalised) == expected


@gpu
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("n", "k"), [(2, 1024), (66, 192), (1000, 4160), (1024, 5376), (6144, 512), (80, 1000)])
def test_any_shape(n: int, k: int, nested: bool) -> None:
    """Any kernel may multiply; if a launch cannot do it, or not in tiles, torch's operations come behind it."""
    w = random_weight(n, k, 64, nested)
    for m in (1, 2, 8, 9, 17, 32, 33, 75, 129, 300):
        for dtype in SIXTEEN_BIT:
            check(w, m, (n, k), dtype, same_sums=False)
        x = torch.randn(m, k, device=DEVICE, dtype=BFLOAT16) / k**0.5
        gate_up = fused(w, x)
        for tile in (1, 16, 24):
            rows = rows_of(gated(w, x, None, None, "silu", tile), m, n // 2)
            assert is_right(rows, gate_up, "silu", same_sums=False), (m, tile)


@gpu
@pytest.mark.parametrize("m", [1, 12, 40, 300])
def test_views_float32_and_no_rows(m: int) -> None:
    w = random_weight(512, 1024)
    wide = torch.randn(m, 3, 2 * 1024, device=DEVICE) / 32
    for dtype in (*SIXTEEN_BIT, torch.float32):
        x = wide.to(dtype)[..., ::2]
        bias = torch.randn(513, device=DEVICE, dtype=dtype)[1:]
        gate_up = fused(w, x, bias)
        for activation in ACTIVATIONS:
            found = gated(w, x, bias, None, activation)
            assert found.shape == (m, 3, 256)
            if dtype == torch.float32:
                assert torch.equal(found, reference.gated(gate_up, activation))
            else:
                assert is_right(found, gate_up, activation, same_sums=False)
                tiles = gated(w, x, bias, None, activation, 16)
                found = rows_of(tiles, 3 * m, 256)
                assert is_right(found, gate_up.flatten(0, 1), activation, same_sums=False)
        assert gated(w, x[:0], None, None, "silu").shape == (0, 3, 256)
        assert gated(w, x[:0], None, None, "silu", 16).shape == (0, 4, 16, 64)


@gpu
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_that_are_not_small(activation: str, dtype: torch.dtype) -> None:
    ends = torch.tensor([-1e4, -100, -88, -20, 0, 20, 88, 100, 1e4], device=DEVICE, dtype=dtype)
    gates, ups = ends.repeat(57)[:512], torch.tensor([1, -2], device=DEVICE, dtype=dtype).repeat(256)
    w, bias = random_weight(1024, 1024), torch.cat((gates, ups))
    for m, tile in itertools.product((1, 9, 32, 64, 200), (0, 16)):
        found = gated(w, torch.zeros(m, 1024, device=DEVICE, dtype=dtype), bias, None, activation, tile)
        rows = rows_of(found, m, 512) if tile else found
        assert torch.allclose(rows, reference.gated(bias, activation).expand(m, 512), rtol=1e-2, atol=1e-8), (m, tile)


@gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("m", [1, 8, 16, 32, 64, 100])
def test_layers_in_a_graph(m: int, activation: str) -> None:
    """Launches overlap: what one normalises, multiplies, gates and tiles, the next one multiplies and adds to."""
    layers = [[random_weight(n, k) for n, k in [(12288, 4096), (4096, 6144)]] for _ in range(3)]
    norms = torch.randn(3, 4096, device=DEVICE, dtype=BFLOAT16) * 0.03
    x = torch.randn(m, 4096, device=DEVICE, dtype=BFLOAT16)
    own = cuda.token_tile(DEVICE, x.dtype, m, (4096, 6144), 64, True)

    def run(tile: int) -> list[torch.Tensor]:
        states = [x]
        for (up, down), norm in zip(layers, norms, strict=True):
            inner = gated(up, states[-1], None, norm, activation, tile)
            if tile:
                y = cuda.tiled_linear(inner, m, down.weight, None, states[-1])
            else:
                y = cuda.fused_linear(inner, down.weight, None, states[-1])
            states += [inner, y]
        return states

    def same(states: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
        rows = [rows_of(state, m, 6144) if state.ndim == 4 else state for state in states]
        return all(torch.equal(a, b) for a, b in zip(rows, expected, strict=True))

    expected = run(0)
    assert all(bool(state.isfinite().all()) for state in expected)
    for tile in {0, own}:
        assert same(run(tile), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            states = run(tile)
        for _ in range(50):
            for state in states[1:]:
                state.fill_(float("nan"))
            graph.replay()
            assert same(states, expected)


def wrong_arguments(device: torch.device | str) -> None:
    n, k = 64, 128
    q = quantized((n, k), 64, True, seed=1)
    packed, _, *rest = (t.to(device) if isinstance(t, torch.Tensor) else t for t in q.weight.arguments())
    x = torch.zeros(2, k, device=device, dtype=BFLOAT16)
    for rows, activation, tile in ((n, "relu", 0), (n - 1, "silu", 0), (n, "silu", -1)):
        with pytest.raises(ValueError, match=f"'{activation}', {rows}, {tile}"):
            ops.gated_linear(x, Weight.of(packed, [rows, k], *rest), activation=activation, tile=tile)


@gpu
def test_what_is_wrong_is_named() -> None:
    wrong_arguments(DEVICE)


def test_what_is_wrong_is_named_on_a_cpu() -> None:
    wrong_arguments("cpu")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("nested", [False, True])
def test_on_a_cpu(nested: bool, activation: str) -> None:
    q = quantized((96, 192), 64, nested, seed=1)
    exact = reference.dequantize(q.weight, torch.float32).double()
    x, bias, norm_weight = torch.randn(2, 5, 192) * 5, torch.randn(96), torch.randn(192)
    for more, norm in itertools.product((None, bias), (None, norm_weight)):
        rows = x.double() if norm is None else functional.rms_norm(x.double(), (192,), norm.double(), 0.1)
        gate, up = (rows @ exact.T + (0 if more is None else more.double())).chunk(2, -1)
        arguments = x, q.weight, more, norm, 0.1, activation
        found = ops.gated_linear(*arguments)
        assert found.shape == (2, 5, 48)
        assert is_close(found, activated(gate, activation) * up)
        tiles = ops.gated_linear(*arguments, 8)
        assert torch.equal(tiles, reference.tile_activations(found.flatten(0, 1), 8))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_sums_and_activations_are_rounded(activation: str) -> None:
    q = quantized((96, 128), 64, True, seed=1)
    x = (torch.randn(7, 128) * 20).to(BFLOAT16)
    gate, up = ops.linear(x, q.weight).chunk(2, -1)
    found = ops.gated_linear(x, q.weight, activation=activation)
    expected = activated(gate, activation).to(BFLOAT16) * up
    assert int((found != expected)[gate > -3].sum()) <= 3
