"""GEMMs that normalise their input or add a residual: in their own launches on a GPU, in torch's operations elsewhere."""

from __future__ import annotations

import itertools

import pytest
import torch

from nf4_kernels import cuda, ops, reference
from nf4_kernels.cuda import device, launches
from nf4_kernels.plan import NORM_K, WGMMA_INSTANCES, Rows, plan, rows_candidates
from tests.nf4_kernels.cuda.cuda_weights import DEVICE, HAS_ROWS, HOPPER, TOLERANCE, Random, gpu, random_weight, split
from tests.nf4_kernels.weights import is_close, quantized

EPS = 1e-2
BFLOAT16 = torch.bfloat16


def unlike_rows(m: int, k: int, device: torch.device | str, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    """Rows of different sizes: some far below the root of EPS, some far above it."""
    sizes = 10 ** torch.linspace(-3, 1, m, device=device)[torch.randperm(m, device=device)]
    return (torch.randn(m, k, device=device) * sizes[:, None]).to(dtype)


def exactly(
    w: Random,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
) -> torch.Tensor:
    """The result in float64."""
    out = exactly_normalised(x, norm_weight) @ w.exact().T
    return out + sum(more.double() for more in (bias, residual) if more is not None)


def exactly_normalised(x: torch.Tensor, norm_weight: torch.Tensor | None) -> torch.Tensor:
    rows = x.double()
    if norm_weight is None:
        return rows
    return rows / (rows.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * norm_weight.double()


def check(w: Random, m: int, what: object, dtype: torch.dtype = BFLOAT16) -> None:
    """Every combination of bias, residual and norm against the oracle, on poisoned memory, twice the same bits."""
    x = unlike_rows(m, w.k, DEVICE, dtype)
    bias, norm_weight = (torch.randn(size, device=DEVICE, dtype=dtype) for size in (w.n, w.k))
    residual = torch.randn(m, w.n, device=DEVICE, dtype=dtype)
    for has in itertools.product((False, True), repeat=3):
        fusion = [more if wanted else None for more, wanted in zip((bias, residual, norm_weight), has, strict=True)]
        expected = exactly(w, x, *fusion)
        # In proportion to what the result is made of: parts may cancel, and a single sum may be near zero.
        sums, rows = exactly(w, x, None, None, fusion[2]), exactly_normalised(x, fusion[2])
        usual = max(float(sums.norm()), float(rows.norm() * w.exact().norm()) / w.k**0.5)
        usual += sum(float(more.double().norm()) for more in fusion[:2] if more is not None)
        torch.full((m, w.n), float("nan"), device=DEVICE, dtype=dtype)
        got = fused(w, x, *fusion)
        error = float((got.double() - expected).norm()) / usual
        # Where torch normalises, its rounding comes on top; a few outputs may all be rounded badly.
        assert error < TOLERANCE[dtype] * (3 if w.n * m < 1000 else 1.25), (what, m, has, error)
        assert torch.equal(fused(w, x, *fusion), got), (what, m, has)


def fused(
    w: Random,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    return cuda.fused_linear(x, w.weight, bias, residual, norm_weight, EPS)


@gpu
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1024), (63, 192), (1000, 4160), (64, 64), (96, 8192), (300, 5376), (48, 25600), (40, 1000)]
)
@pytest.mark.parametrize("nested", [False, True])
def test_any_shape(n: int, k: int, nested: bool) -> None:
    w = random_weight(n, k, 64, nested)
    for m in (*range(1, 18), 24, 31, 32, 33, 48, 64, 65, 128, 129, 200, 256, 300):
        check(w, m, (n, k))
    for dtype in (torch.float16, torch.float32):
        for m in (1, 12, 40):
            check(w, m, (n, k, dtype), dtype)


@gpu
@HAS_ROWS
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("n", "k"), [(200, 8192), (136, 3072), (90, 5376), (7, 1024)])
def test_every_rows_instance(n: int, k: int, nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    w = random_weight(n, k, 64, nested, offsets=nested)
    for m in (1, 7):
        for choice in rows_candidates(n, k, device.arch(DEVICE), 9, nested):
            if choice.passes > 1:
                continue
            monkeypatch.setattr(launches, "_plan", lambda *_, choice=choice: choice)
            check(w, m, str(choice))


@gpu
@HOPPER
@pytest.mark.parametrize(("tokens", "groups"), WGMMA_INSTANCES)
def test_every_wgmma_instance(tokens: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for n, k, m, blocks, first_steps in [
        (1000, 4160, tokens, 132, 0),
        (193, 448, 2 * tokens + 1, 5, 0),
        (514, NORM_K, tokens - 1, 11, 0),
        (1000, 4160, tokens + 1, 2, 10),
    ]:
        choice = split(tokens, groups, m, n, k, blocks, first_steps)
        monkeypatch.setattr(launches, "_plan", lambda *_, choice=choice: choice)
        check(random_weight(n, k), m, str(choice))


@gpu
@pytest.mark.parametrize("m", [1, 2, 8, 16, 32, 100])
def test_layers_in_a_graph(m: int) -> None:
    """Launches overlap: what one writes the next one normalises, and the one after that adds."""
    layers = [[random_weight(n, k) for n, k in [(6144, 4096), (4096, 6144)]] for _ in range(3)]
    norms = torch.randn(3, 4096, device=DEVICE, dtype=BFLOAT16)
    x = torch.randn(m, 4096, device=DEVICE, dtype=BFLOAT16)

    def run() -> list[torch.Tensor]:
        states = [x]
        for (up, down), norm in zip(layers, norms, strict=True):
            inner = fused(up, states[-1], norm_weight=norm)
            states += [inner, fused(down, torch.nn.functional.rms_norm(inner, (6144,)), residual=states[-1])]
        return states

    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        states = run()
    for _ in range(50):
        for state in states[1:]:
            state.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(states, expected, strict=True))


@gpu
def test_what_is_fused() -> None:
    for normalised in (False, True):
        assert ops.can_fuse(DEVICE, BFLOAT16, 1, (5120, 8192), 64, True, normalised)
        assert not ops.can_fuse(DEVICE, BFLOAT16, 1, (5120, 1000), 64, True, normalised)
        assert not ops.can_fuse(DEVICE, BFLOAT16, 5000, (5120, 8192), 64, True, normalised)
        assert ops.can_fuse(DEVICE, torch.float16, 1, (5120, 8192), 64, True, normalised) != normalised
        assert ops.can_fuse(DEVICE, BFLOAT16, 1, (5120, NORM_K + 256), 64, True, normalised) != normalised


@gpu
def test_wrong_arguments_are_named() -> None:
    w = random_weight(64, 128)
    x = torch.randn(2, 128, device=DEVICE, dtype=BFLOAT16)
    with pytest.raises(ValueError, match=r"residual must be torch.bfloat16 of shape \(2, 64\)"):
        fused(w, x, residual=torch.zeros(1, 64, device=DEVICE, dtype=BFLOAT16))
    with pytest.raises(ValueError, match=r"norm_weight must be torch.bfloat16 of shape \(128,\)"):
        fused(w, x, norm_weight=torch.zeros(128, device=DEVICE))


def test_normalising_plans_have_one_pass() -> None:
    for n, k in [(10240, 8192), (57344, 8192), (51200, 5120), (6144, 4096), (3000, 14336)]:
        for m in (1, 2, 4, 8, 16, 32):
            choice = plan(m, n, k, 90, 132, normalised=True)
            assert not isinstance(choice, Rows) or choice.passes == 1, (n, k, m)


@pytest.mark.parametrize("nested", [False, True])
def test_on_a_cpu(nested: bool) -> None:
    q = quantized((48, 128), 64, nested, seed=1)
    x, bias, norm_weight, residual = torch.randn(3, 128), torch.randn(48), torch.randn(128), torch.randn(3, 48)
    normalised = torch.nn.functional.rms_norm(x, (128,), norm_weight, 0.1)
    expected = residual + reference.linear(normalised, q.weight, bias)
    assert is_close(ops.fused_linear(x, q.weight, bias, residual, norm_weight, 0.1), expected)
    assert torch.equal(ops.fused_linear(x, q.weight, bias), ops.linear(x, q.weight, bias))
    assert not ops.can_fuse(torch.device("cpu"), BFLOAT16, 1, (48, 128), 64, nested, False)
