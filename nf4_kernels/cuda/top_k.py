"""The op nf4::top_k, what a router of experts asks for: the k greatest values of each row, in one launch on CUDA.

    nf4::top_k(Tensor x, int k) -> (Tensor values, Tensor indices)

x [.., width] of a floating type; values [.., k] in descending order and indices int64 [.., k], as torch.topk gives them.
NaN is the greatest. Unlike torch.topk's, equal values come in the order of their indices.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nf4_kernels.cuda.library import load_error, raise_for, usable
from nf4_kernels.params import DTYPES

MOST_WIDTH = 1024
"""Values of a row that one launch takes."""
_library = torch.library.Library("nf4", "FRAGMENT")
_library.define("top_k(Tensor x, int k) -> (Tensor, Tensor)")


def can_select(device: torch.device, dtype: torch.dtype, width: int, k: int) -> bool:
    """Whether nf4::top_k is one launch for rows of that width."""
    return device.type == "cuda" and dtype in DTYPES and 1 <= k <= width <= MOST_WIDTH and load_error() is None


def _in_torch(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, indices = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :k].contiguous(), indices[..., :k].contiguous()


def _on_cuda(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    if x.numel() == 0 or not can_select(x.device, x.dtype, width, k):
        return _in_torch(x, k)
    x = x.contiguous()
    shape = (*x.shape[:-1], k)
    values, indices = x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
    with torch.cuda.device(x.device):
        loaded = usable()
        status = loaded.nf4_cuda_top_k(
            x.data_ptr(), values.data_ptr(), indices.data_ptr(), math.prod(x.shape[:-1]), width, k, DTYPES[x.dtype],
            torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        raise_for(loaded, status, f"top_k of {list(x.shape)}")
    return values, indices


_library.impl("top_k", _in_torch, "CPU")
_library.impl("top_k", _on_cuda, "CUDA")


@torch.library.register_fake("nf4::top_k")  # type: ignore[untyped-decorator]
def _(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
