"""A mixture's router in one launch on CUDA: softmax, selection and weights, and for few tokens the GEMM in front of them.

logits [.., width] of a floating type. experts int32 [.., k] are those of the k greatest of softmax(logits) in float32, in
descending order; equal ones come in the order of their indices. weights float32 [.., k] are these probabilities, divided by
their sum where they are normalised, rounded to the type `rounded`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from nf4_kernels.cuda.device import capability
from nf4_kernels.cuda.library import load_error, raise_for, usable
from nf4_kernels.params import DTYPES

MOST_WIDTH = 1024
"""Logits of a row that one launch takes."""
MOST_CHOICES = 32
"""Choices of a row that one launch finds."""
MOST_TOKENS = 128
"""Tokens up to which one launch computes logits, too: each 8 tokens read the weight."""


def can_route(device: torch.device, dtype: torch.dtype, width: int, k: int) -> bool:
    """Whether route() is one launch for rows of that width."""
    fits = 1 <= k <= min(width, MOST_CHOICES) and width <= MOST_WIDTH
    return fits and device.type == "cuda" and dtype in DTYPES and load_error() is None


def can_route_linear(device: torch.device, dtype: torch.dtype, width: int, hidden: int, k: int) -> bool:
    """Whether route_linear() is one launch for few tokens."""
    fits = width <= 128 and 256 <= hidden <= 4096 and hidden % 256 == 0 and dtype in (torch.float16, torch.bfloat16)
    return fits and can_route(device, dtype, width, k) and capability(device)[0] >= 9


def _in_torch(logits: Tensor, k: int, normalised: bool, rounded: torch.dtype) -> tuple[Tensor, Tensor]:
    values, indices = torch.softmax(logits.float(), -1).sort(dim=-1, descending=True, stable=True)
    weights = values[..., :k].contiguous()
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(rounded).float(), indices[..., :k].to(torch.int32).contiguous()


def route(logits: Tensor, k: int, normalised: bool, rounded: torch.dtype) -> tuple[Tensor, Tensor]:
    """weights and experts of logits."""
    width = logits.shape[-1]
    if logits.numel() == 0 or rounded not in DTYPES or not can_route(logits.device, logits.dtype, width, k):
        return _in_torch(logits, k, normalised, rounded)
    logits = logits.contiguous()
    weights, experts = _empty(logits, k, normalised, rounded)
    with torch.cuda.device(logits.device):
        loaded = usable()
        status = loaded.nf4_cuda_route(
            logits.data_ptr(), weights.data_ptr(), experts.data_ptr(), math.prod(logits.shape[:-1]), width, k,
            DTYPES[logits.dtype], normalised, DTYPES[rounded], torch.cuda.current_stream(logits.device).cuda_stream,
        )  # fmt: skip
        raise_for(loaded, status, f"routes of {list(logits.shape)}")
    return weights, experts


def _empty(logits: Tensor, k: int, normalised: bool, rounded: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def route_linear(x: Tensor, weight: Tensor, k: int, normalised: bool, rounded: torch.dtype) -> tuple[Tensor, Tensor]:
    """weights and experts of the logits x [tokens, hidden] @ weight.T, in x's dtype.

    weight [width, hidden] is one of the model's parameters: it may be read before the launch in front has ended, so nothing
    may write it.
    """
    (tokens, hidden), width = x.shape, weight.shape[0]
    alike = weight.dtype == x.dtype and weight.device == x.device and weight.shape == (width, hidden)
    fits = 0 < tokens <= MOST_TOKENS and alike and rounded in DTYPES and weight.is_contiguous()
    x = x.contiguous()
    if not fits or (x.data_ptr() | weight.data_ptr()) % 16 or not can_route_linear(x.device, x.dtype, width, hidden, k):
        return route(functional.linear(x, weight), k, normalised, rounded)
    weights, experts = _empty(x, k, normalised, rounded)
    with torch.cuda.device(x.device):
        loaded = usable()
        status = loaded.nf4_cuda_route_linear(
            x.data_ptr(), weight.data_ptr(), weights.data_ptr(), experts.data_ptr(), tokens, hidden, width, k,
            DTYPES[x.dtype], normalised, DTYPES[rounded], torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        raise_for(loaded, status, f"routes of {list(x.shape)} by {list(weight.shape)}")
    return weights, experts
