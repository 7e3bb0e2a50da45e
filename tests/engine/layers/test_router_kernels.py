"""The launches of a router in float32, compiled, and in Triton's interpreter and on a GPU compared with float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.engine.compiled import run_compiled
from tests.engine.interpreted import run_interpreted

SIZES = ((1, 64, 2048, 4), (3, 160, 1000, 6), (65, 8, 256, 2), (64, 384, 4096, 8))


def check(device: str, dtype: torch.dtype, compares: bool = True, sizes: tuple[tuple[int, ...], ...] = SIZES) -> None:
    """Compare with float64, if there are results."""
    from server.engine.runtime.layers.router_kernels import route

    torch.manual_seed(0)
    for tokens, count, width, top_k in sizes:
        x = torch.randn(tokens, width + 8, device=device).to(dtype)[:, :width]
        weight = torch.randn(count, width, device=device).to(dtype) / width**0.5
        bias = torch.randn(count, device=device)
        # Equal sums come in the order of their experts.
        weight[1], bias[1] = weight[count - 1], bias[count - 1]
        for normalised, added in itertools.product((True, False), (bias, None)):
            weights, experts = route(x, weight, added, top_k, normalised, 1.8)
            if not compares:
                continue
            logits = x.double() @ weight.double().T
            scores = logits.softmax(-1) if added is None else logits.sigmoid()
            ranked = scores if added is None else scores + added
            chosen = torch.sort(ranked, dim=-1, descending=True, stable=True)[1][:, :top_k]
            expected = scores.gather(-1, chosen)
            if normalised:
                expected = expected / expected.sum(-1, keepdim=True)
            assert experts.dtype == torch.int32
            assert torch.equal(experts.long(), chosen)
            torch.testing.assert_close(weights.double(), expected * 1.8, atol=1e-6, rtol=1e-5)


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted(
        "import torch\n"
        "torch.cuda.get_device_capability = lambda device=None: (8, 0)\n"
        "from tests.engine.layers.test_router_kernels import SIZES, check\n"
        "check('cpu', torch.float16, sizes=SIZES[:3])\ncheck('cpu', torch.float32, sizes=SIZES[:3])\n"
    )


@pytest.mark.parametrize("capability", [(8, 6), (9, 0)])
def test_compiled(capability: tuple[int, int]) -> None:
    pytest.importorskip("triton")
    run_compiled(
        "from tests.engine.layers.test_router_kernels import check\ncheck('cpu', torch.bfloat16, False)\n", capability
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    check("cuda", dtype)
