"""route() against softmax, selection and normalisation in float64, and the order of what is equal."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nf4_kernels.cuda import routing
from nf4_kernels.cuda.routing import MOST_CHOICES, MOST_TOKENS, MOST_WIDTH, can_route, can_route_linear
from tests.nf4_kernels.cuda.cuda_weights import ON_GPU, gpu

DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
# Half a unit in the last place, of float32 with an exponential and a sum in front.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def route(
    logits: Tensor, k: int, normalised: bool = True, rounded: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    weights, experts = routing.route(logits, k, normalised, rounded)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int32)
    return weights, experts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rounded", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 8), (5, 32), (3, 60), (200, 128), (2, 3, 160), (9, 256), (7, 700), (4, 1024)], ids=str
)
def test_weights_and_experts(shape: tuple[int, ...], dtype: torch.dtype, rounded: torch.dtype, device: str) -> None:
    logits = (torch.randn(shape, device=device) * 3).to(dtype)
    exact = torch.softmax(logits.double(), -1)
    for k in (1, 4, min(8, shape[-1]), min(MOST_CHOICES, shape[-1])):
        for normalised in (True, False):
            weights, experts = route(logits, k, normalised, rounded)
            assert experts.long().sort(-1).values.diff().ne(0).all()
            chosen = exact.gather(-1, experts.long())
            # What float32 tells apart is in its order.
            torch.testing.assert_close(chosen, exact.topk(k).values, rtol=1e-6, atol=0)
            wanted = chosen / chosen.sum(-1, keepdim=True) if normalised else chosen
            least = 1e-7 if rounded == torch.float16 else 0.0  # float16 has no smaller numbers
            torch.testing.assert_close(weights.double(), wanted, rtol=TOLERANCE[rounded], atol=least)
            assert torch.equal(weights, weights.to(rounded).float())


@pytest.mark.parametrize("device", DEVICES)
def test_equal_probabilities_come_in_the_order_of_their_indices(device: str) -> None:
    logits = torch.randint(-2, 3, (50, 130), device=device).float()
    # Float32 cannot tell these probabilities apart, so the lower index comes first though its logit is smaller.
    logits[2, 20:24] = torch.tensor([9.0, 9.0, 1e-9, 2e-9], device=device)
    logits[2, :20], logits[2, 24:] = -3.0, -4.0
    logits[3] = float("-inf")
    logits[4, 70] = float("nan")
    logits[5, 9] = float("inf")
    logits[6] = -200.0
    logits[6, 100] = 1.0  # all others are 0
    wanted = torch.softmax(logits.cpu(), -1).sort(dim=-1, descending=True, stable=True)
    weights, experts = route(logits, 9, normalised=False)
    assert torch.equal(experts.cpu().long(), wanted.indices[:, :9])
    torch.testing.assert_close(weights.cpu(), wanted.values[:, :9], equal_nan=True)


@gpu
def test_all_results_are_written_and_the_same_each_time() -> None:
    logits = torch.randn(33, 128, device="cuda", dtype=torch.bfloat16)
    first = route(logits, 8)
    for _ in range(3):
        del_me = torch.full((33 * 8,), float("nan"), device="cuda")
        del del_me
        for result, again in zip(first, route(logits, 8), strict=True):
            assert torch.equal(result, again)


@gpu
def test_rows_of_any_layout_and_width() -> None:
    logits = torch.randn(40, 64, device="cuda")
    for given in (logits.t(), logits[:, ::2], logits[:0], torch.randn(3, MOST_WIDTH + 1, device="cuda")):
        weights, experts = route(given, 5)
        wanted = torch.softmax(given.double(), -1).topk(5)
        assert torch.equal(experts.long(), wanted.indices)
        exact = wanted.values / wanted.values.sum(-1, keepdim=True)
        torch.testing.assert_close(weights.double(), exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("width", "hidden", "k"),
    [(128, 2048, 8), (60, 2048, 4), (8, 4096, 2), (64, 256, 8), (100, 1280, 5), (16, 512, 16), (33, 3840, 32)],
)
def test_with_the_gemm(width: int, hidden: int, k: int, dtype: torch.dtype, device: str) -> None:
    for tokens in (1, 3, 8, 9, 61, MOST_TOKENS, MOST_TOKENS + 1):
        # Logits that their type holds exactly, so that rounding decides nothing.
        x = torch.zeros(tokens, hidden, device=device, dtype=dtype)
        x.scatter_(1, torch.randint(hidden, (tokens, 3), device=device), 2.0)
        weight = torch.randint(-8, 9, (width, hidden), device=device).to(dtype)
        logits = (x.double() @ weight.double().t()).to(dtype)
        if device == "cuda":
            torch.cuda.synchronize()  # weights are constant for the launch
        for normalised, rounded in ((True, dtype), (False, torch.float32)):
            weights, experts = routing.route_linear(x, weight, k, normalised, rounded)
            wanted = route(logits, k, normalised, rounded)
            assert torch.equal(experts, wanted[1])
            assert torch.equal(weights, wanted[0])
        x = torch.randn(tokens, hidden, device=device).to(dtype) / hidden**0.5
        weights, experts = routing.route_linear(x, weight, k, False, torch.float32)
        logits = x.double() @ weight.double().t()
        exact = torch.softmax(logits, -1)
        chosen = exact.gather(-1, experts.long())
        # A logit and the greatest one of its row are each rounded by half a unit.
        rounding = math.expm1(1.1 * torch.finfo(dtype).eps * float(logits.abs().max()))
        torch.testing.assert_close(weights.double(), chosen, rtol=rounding, atol=0)
        # What is not chosen is hardly greater than what is.
        assert ((exact.scatter(-1, experts.long(), 0.0).amax(-1) - chosen.amin(-1)) / chosen.amin(-1)).max() < rounding
        assert experts.long().sort(-1).values.diff().ne(0).all()


def test_what_one_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a machine with a Hopper GPU and the compiled library.
    monkeypatch.setattr(routing, "load_error", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda, bfloat16 = torch.device("cuda"), torch.bfloat16
    assert can_route(cuda, torch.float32, MOST_WIDTH, MOST_CHOICES)
    assert not can_route(torch.device("cpu"), torch.float32, 128, 8)
    assert not can_route(cuda, torch.float64, 128, 8)
    assert not can_route(cuda, torch.float32, MOST_WIDTH + 1, 8)
    assert not can_route(cuda, torch.float32, 128, MOST_CHOICES + 1)
    assert not can_route(cuda, torch.float32, 8, 9)
    assert can_route_linear(cuda, bfloat16, 128, 2048, 8)
    assert not can_route_linear(cuda, torch.float32, 128, 2048, 8)
    assert not can_route_linear(cuda, bfloat16, 129, 2048, 8)
    assert not can_route_linear(cuda, bfloat16, 128, 2000, 8)
    assert not can_route_linear(cuda, bfloat16, 128, 4096 + 256, 8)
    assert not can_route_linear(torch.device("cpu"), bfloat16, 128, 2048, 8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not can_route_linear(cuda, bfloat16, 128, 2048, 8)
