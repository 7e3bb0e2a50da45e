"""GEMMs by heads' matrices, compiled, and in Triton's interpreter and on a GPU compared with float64."""

from __future__ import annotations

import pytest
import torch

from tests.engine.compiled import run_compiled
from tests.engine.interpreted import run_interpreted


def check(device: str, dtype: torch.dtype, compares: bool = True) -> None:
    """Compare with float64, if there are results: few heads of the sizes of GLM, DeepSeek and MiniCPM3, and odd ones."""
    from server.engine.runtime.attention.kernels.head_matrices import multiply_heads

    torch.manual_seed(0)
    for tokens, heads, plain, width, rank, rotary in (
        (1, 5, 192, 256, 512, 64), (33, 2, 128, 128, 512, 64), (17, 5, 64, 64, 256, 32), (64, 3, 24, 48, 80, 16),
    ):  # fmt: skip
        weight = (torch.randn(heads, plain + width, rank, device=device) / 16).to(dtype)
        key, value = weight[:, :plain], weight[:, plain:].transpose(1, 2)
        # Parts of larger tensors.
        query = torch.randn(tokens, heads + 1, plain + rotary, device=device).to(dtype)[:, 1:]
        sums = torch.randn(tokens, heads, rank, device=device).to(dtype)
        absorbed, values = multiply_heads(query, key, rotary), multiply_heads(sums, value)
        assert absorbed.shape == (tokens, heads, rank + rotary)
        if not compares:
            continue
        # The interpreter rounds a result down.
        near = {"atol": 2e-4, "rtol": 2 * torch.finfo(dtype).eps}
        expected = torch.einsum("thd,hdr->thr", query[..., :plain].double(), key.double())
        torch.testing.assert_close(absorbed[..., :rank].double(), expected, **near)
        assert torch.equal(absorbed[..., rank:], query[..., plain:])
        expected = torch.einsum("thr,hrv->thv", sums.double(), value.double())
        torch.testing.assert_close(values.double(), expected, **near)


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted(
        "import torch\n"
        "torch.cuda.get_device_capability = lambda device=None: (8, 0)\n"
        "from tests.engine.attention.test_head_matrices import check\n"
        "check('cpu', torch.float16)\n"
    )


@pytest.mark.parametrize(("capability", "room"), [((8, 6), 99), ((9, 0), 227)])
def test_compiled(capability: tuple[int, int], room: int) -> None:
    """With the shared memory that a thread block may have, `room` KiB."""
    pytest.importorskip("triton")
    run_compiled(
        "from tests.engine.attention.test_head_matrices import check\n"
        f"check('cpu', torch.bfloat16, False)\nassert max(shared_memory.values()) <= {room} * 2**10\n",
        capability,
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    check("cuda", dtype)
