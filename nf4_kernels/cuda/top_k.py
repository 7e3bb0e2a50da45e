"""The k greatest values of each row, as routers of experts ask for them, in one launch on CUDA."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nf4_kernels.cuda.library import load_error, raise_for, usable
from nf4_kernels.params import DTYPES

MOST_WIDTH = 1024
"""Values of a row that one launch takes."""


def can_select(device: torch.device, dtype: torch.dtype, width: int, k: int) -> bool:
    """Whether top_k() is one launch for rows of that width."""
    return device.type == "cuda" and dtype in DTYPES and 1 <= k <= width <= MOST_WIDTH and load_error() is None


def _in_torch(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, indices = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :k].contiguous(), indices[..., :k].contiguous()


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k greatest of x [.., width], in descending order, and their indices, int64, as torch.topk gives them.

    NaN is the greatest. Unlike torch.topk's, equal values come in the order of their indices.
    """
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
