"""The CUDA kernels against the oracle in float64, on awkward shapes, on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nf4_kernels import cuda, reference
from nf4_kernels.cuda import device, launches
from nf4_kernels.cuda.workspace import workspace_on
from nf4_kernels.plan import WGMMA_INSTANCES, rows_candidates
from tests.nf4_kernels.cuda.cuda_weights import (
    DEVICE,
    HAS_ROWS,
    HOPPER,
    ON_GPU,
    TOLERANCE,
    random_weight,
    relative_error,
    split,
)

pytestmark = ON_GPU
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("blocksize", [32, 64, 128, 256, 512, 1024, 2048, 4096])
def test_dequantize_is_the_oracle_bit_for_bit(blocksize: int, nested: bool) -> None:
    for n, k in [(64, 192), (1, 1), (1, 64), (63, 65), (7, 4130), (1000, 4160)]:
        w = random_weight(n, k, blocksize, nested)
        for dtype in (torch.float32, *HALVES):
            got = cuda.dequantize(w.weight, dtype)
            expected = reference.dequantize(w.weight, dtype)
            assert torch.equal(got, expected), (n, k, dtype)


@pytest.mark.parametrize("blocksize", [64, 256])
def test_an_offset_for_every_256_blocks(blocksize: int) -> None:
    for n, k in [(63, 192), (1000, 4160), (300, 5376), (512, 8192), (12, 25600), (9, 1000)]:
        w = random_weight(n, k, blocksize, offsets=True)
        got = cuda.dequantize(w.weight, torch.float32)
        assert torch.equal(got.double(), w.exact()), (n, k)
        for m in (1, 8, 16, 32, 300):
            x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
            # Few outputs may all lie near zero, where rounded weights weigh more.
            tolerance = TOLERANCE[torch.bfloat16] * (3 if m * n < 64 else 1)
            assert relative_error(w.linear(x), x.double() @ w.exact().T) < tolerance, (n, k, m)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1024), (63, 192), (1000, 4160), (64, 64), (96, 8192), (48, 25600), (300, 5376), (80, 960)]
)
def test_linear_of_every_number_of_tokens(n: int, k: int, nested: bool, dtype: torch.dtype) -> None:
    w = random_weight(n, k, 64, nested)
    exact = w.exact()
    for m in (*range(1, 34), 48, 64, 65, 127, 128, 129, 256, 300):
        x = torch.randn(m, k, device=DEVICE, dtype=dtype)
        torch.full((m, n), float("nan"), device=DEVICE, dtype=dtype)  # the allocator hands these NaNs to the output
        expected = x.double() @ exact.T
        # A single sum can happen to be near zero: then its error counts against the size that sums have.
        usual = float(x.double().norm() * exact.norm()) / k**0.5
        error = float((w.linear(x).double() - expected).norm()) / max(float(expected.norm()), usual)
        assert error < TOLERANCE[dtype] * (3 if n == 1 else 1), (m, error)


@pytest.mark.parametrize("blocksize", [32, 64, 128, 256, 512])
def test_linear_of_every_blocksize_and_an_odd_k(blocksize: int) -> None:
    for n, k in [(100, 4160), (40, 1000), (33, 8192), (160, 6400)]:
        w = random_weight(n, k, blocksize)
        for m in (1, 8, 9, 16, 31, 70):
            x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
            assert relative_error(w.linear(x), x.double() @ w.exact().T) < TOLERANCE[torch.bfloat16], (n, k, m)


@pytest.mark.parametrize("m", [1, 8, 16, 32, 200])
def test_bias_views_and_float32(m: int) -> None:
    w = random_weight(500, 5120)
    for dtype in (*HALVES, torch.float32):
        bias = torch.randn(500, device=DEVICE, dtype=dtype) * 100
        x = torch.randn(m, 3, 2 * 5120, device=DEVICE, dtype=dtype)[..., ::2]
        exact = x.double() @ w.exact().T + bias.double()
        got = w.linear(x, bias)
        assert got.shape == (m, 3, 500)
        assert relative_error(got, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("m", [1, 8, 16, 24, 32, 64, 128, 256])
def test_results_do_not_change_from_run_to_run(m: int) -> None:
    for n, k in [(5120, 25600), (1024, 8192), (25600, 5120), (8192, 28672)]:
        w = random_weight(n, k)
        x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
        first = w.linear(x)
        different = torch.zeros((), device=DEVICE)
        for _ in range(300):
            different += (w.linear(x) != first).any()
        assert different == 0, (n, k, m)


@HAS_ROWS
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("multiprocessors", [5, 9])
@pytest.mark.parametrize(("n", "k"), [(200, 8192), (136, 3072), (333, 1024), (90, 5376), (80, 12800), (112, 1600)])
def test_every_rows_instance_however_its_work_is_split(
    n: int, k: int, multiprocessors: int, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that begin and end within a row group, parts that do not fill their block, in one block or several."""
    w = random_weight(n, k, 64, nested, offsets=nested)
    exact, arch = w.exact(), device.arch(DEVICE)
    for m in (1, 2, 7, 8):
        for choice in rows_candidates(n, k, arch, multiprocessors, nested):
            monkeypatch.setattr(launches, "_plan", lambda *_, choice=choice: choice)
            for dtype in HALVES:
                x = torch.randn(m, k, device=DEVICE, dtype=dtype)
                torch.full((m, n), float("nan"), device=DEVICE, dtype=dtype)
                got = w.linear(x)
                assert relative_error(got, x.double() @ exact.T) < TOLERANCE[dtype], (str(choice), m)
                assert torch.equal(w.linear(x), got), (str(choice), m)


@HOPPER
@pytest.mark.parametrize(("tokens", "groups"), WGMMA_INSTANCES)
def test_every_wgmma_instance_however_its_work_is_split(
    tokens: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n, k, m, blocksize, nested, blocks, first_steps in [
        (1000, 4160, tokens, 64, True, 132, 0),
        (193, 448, 2 * tokens + 1, 128, False, 5, 0),
        (63, 4096, tokens - 1, 64, True, 7, 0),
        (1, 64, tokens, 512, True, 1, 0),
        (514, 2304, tokens + 9, 64, False, 11, 0),
        (700, 1088, 9, 256, True, 132, 0),
        # More blocks than SMs, one for each tile.
        (20000, 256, tokens + 1, 64, False, 1000, 0),
        # Every tile in 2, 3 and 9 parts.
        (1000, 4160, tokens + 1, 64, True, 2, 10),
        (514, 2304, tokens, 64, False, 3, 4),
        (193, 2304, tokens - 1, 128, True, 9, 1),
    ]:
        choice = split(tokens, groups, m, n, k, blocks, first_steps)
        monkeypatch.setattr(launches, "_plan", lambda *_, choice=choice: choice)
        w = random_weight(n, k, blocksize, nested, offsets=nested)
        for dtype in HALVES:
            x = torch.randn(m, k, device=DEVICE, dtype=dtype)
            workspace = workspace_on(DEVICE)
            assert workspace is not None
            workspace[0].fill_(0xFF)
            torch.full((m, n), float("nan"), device=DEVICE, dtype=dtype)
            got = w.linear(x)
            assert relative_error(got, x.double() @ w.exact().T) < TOLERANCE[dtype] * (3 if n == 1 else 1), (n, k, m)
            assert torch.equal(w.linear(x), got)
            assert not workspace[1].any()


@pytest.mark.parametrize("m", [1, 16, 24, 64, 128, 256])
def test_a_chain_of_gemms_in_a_graph(m: int) -> None:
    """Launches in a graph overlap, and share a workspace."""
    weights = [random_weight(n, k) for n, k in [(5120, 4096), (6144, 5120), (4096, 6144)]]
    x = torch.randn(m, 4096, device=DEVICE, dtype=torch.bfloat16)

    def chain() -> list[torch.Tensor]:
        outputs = [x]
        for w in weights * 3:
            outputs.append(torch.nn.functional.rms_norm(w.linear(outputs[-1]), (w.n,)))
        return outputs

    expected = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = chain()
    for _ in range(100):
        for out in outputs[1:]:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("m", [1, 8, 16, 32, 100, 200])
def test_graphs_and_other_streams(m: int) -> None:
    w = random_weight(1024, 8192)
    x = torch.randn(m, 8192, device=DEVICE, dtype=torch.bfloat16)
    expected = w.linear(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(w.linear(x), expected)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = w.linear(x)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def test_wrong_arguments_are_named() -> None:
    w = random_weight(64, 128)
    x = torch.randn(2, 128, device=DEVICE, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="last dimension must be K = 128"):
        w.linear(x[:, :64])
    with pytest.raises(ValueError, match="bias must be"):
        w.linear(x, torch.zeros(64, device=DEVICE))
    with pytest.raises(ValueError, match="the weight needs"):
        cuda.linear(x, replace(w.weight, packed=w.weight.packed[:100]))
    with pytest.raises(ValueError, match="absmax_offset must be float32 with 1 element"):
        cuda.linear(x, replace(w.weight, absmax_offset=torch.zeros(3, device=DEVICE)))
    with pytest.raises(ValueError, match="blocksize"):
        cuda.dequantize(replace(w.weight, blocksize=48), torch.float32)
