"""top_k() against torch's own selection, and the order of what is equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nf4_kernels.cuda import top_k as selection
from nf4_kernels.cuda.top_k import MOST_WIDTH, can_select
from tests.nf4_kernels.cuda.cuda_weights import ON_GPU, gpu

DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, indices = selection.top_k(x, k)
    assert values.dtype == x.dtype
    assert indices.dtype == torch.int64
    return values, indices


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 8), (5, 32), (3, 60), (129, 128), (2, 3, 160), (9, 256), (7, 700), (4, 1024)], ids=str
)
def test_values_and_indices_are_torchs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x = torch.randn(shape, device=device).to(dtype)
    for k in (1, 4, min(8, shape[-1])):
        values, indices = top_k(x, k)
        assert torch.equal(values, x.topk(k).values)
        assert torch.equal(x.gather(-1, indices), values)
        assert indices.sort(-1).values.diff().ne(0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_equal_values_come_in_the_order_of_their_indices(device: str) -> None:
    x = torch.randint(-2, 3, (50, 130), device=device).float()
    x[x == 0] *= torch.where(torch.rand_like(x[x == 0]) < 0.5, -1.0, 1.0)
    x[3] = float("-inf")
    x[4] = float("nan")
    x[5, 70] = float("nan")
    x[6, 9], x[6, 100] = float("inf"), -float("nan")
    # On CUDA torch's stable sort takes a NaN with a sign for the least value.
    wanted = x.cpu().sort(dim=-1, descending=True, stable=True).indices[:, :9]
    assert torch.equal(top_k(x, 9)[1].cpu(), wanted)


@gpu
def test_rows_of_any_layout_and_width() -> None:
    x = torch.randn(40, 64, device="cuda")
    for given in (x.t(), x[:, ::2], x[:0], torch.randn(3, MOST_WIDTH + 1, device="cuda")):
        values, indices = top_k(given, 5)
        assert torch.equal(values, given.topk(5).values)
        assert torch.equal(given.gather(-1, indices), values)


def test_what_one_launch_takes() -> None:
    assert not can_select(torch.device("cpu"), torch.float32, 128, 8)
    assert not can_select(torch.device("cuda"), torch.float64, 128, 8)
    assert not can_select(torch.device("cuda"), torch.float32, MOST_WIDTH + 1, 8)
    assert not can_select(torch.device("cuda"), torch.float32, 128, 129)
