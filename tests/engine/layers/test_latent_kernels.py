"""The launch before latent attention, compiled, in Triton's interpreter and on a GPU, beside torch's operations."""

from __future__ import annotations

import pytest
import torch

from server.engine.runtime.attention.rotary import RotaryEmbedding
from server.engine.runtime.layers.norm import RmsNorm
from tests.engine.interpreted import run_interpreted


def check(device: str, dtype: torch.dtype, tolerance: float) -> None:
    from server.engine.runtime.layers.latent_kernels import normalise_and_rotate

    torch.manual_seed(0)
    for tokens, heads, plain, rank, columns, angle_step in (
        (3, 20, 192, 512, 64, 1),
        (1, 5, 12, 40, 8, 0),
        (70, 16, 128, 512, 64, 0),
    ):
        angles = torch.randn(tokens, columns // 2, device=device).repeat(1, 2)
        rotary = RotaryEmbedding(angles.cos().to(dtype), angles.sin().to(dtype), angle_step=angle_step)
        norm = RmsNorm(torch.rand(rank, device=device).add(0.5).to(dtype), 1e-6, 0.0)
        # Parts of larger tensors.
        query = torch.randn(tokens, heads, plain + columns + 8, device=device).to(dtype)[..., : plain + columns]
        latent = torch.randn(tokens, rank + columns + 8, device=device).to(dtype)[:, : rank + columns]
        turned, key = rotary.apply(query[..., plain:], latent[:, None, rank:])
        wide = latent[:, :rank].float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
        expected = torch.cat((wide.to(dtype).unsqueeze(1), key), -1)
        before = query.clone()
        found = normalise_and_rotate(query, latent, norm.weight, norm.eps, norm.offset, rotary)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(query[..., plain:], turned, atol=tolerance, rtol=tolerance)
        assert torch.equal(query[..., :plain], before[..., :plain])


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted(
        "import torch\n"
        "torch.cuda.get_device_capability = lambda device=None: (8, 0)\n"
        "from tests.engine.layers.test_latent_kernels import check\n"
        "check('cpu', torch.float16, 1e-3)\ncheck('cpu', torch.float32, 1e-5)\n"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    check("cuda", dtype, torch.finfo(dtype).eps)
