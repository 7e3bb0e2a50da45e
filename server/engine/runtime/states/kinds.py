"""Kinds of state: what a layer keeps of a sequence from one step to the next, in the place of keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LONG_CHUNK = 256
"""Tokens of a chunk from which on kinds with is_chunked may compute it by other kernels.

These are fla's, whose launches take the host 0.8 ms; ours is a single one.
"""


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a layer's state of one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StateKind:
    """State that layers of one kind keep of a sequence. A state of zeros is that of a sequence without tokens."""

    name: str
    """The kind in words, as the log has it."""
    tensors: tuple[StateTensor, ...]
    has_spare: bool = False
    """Whether there is one more slot, the last, which padding reads and writes."""
    is_chunked: bool = False
    """Whether chunks of LONG_CHUNK tokens and more are computed by other kernels than shorter ones."""
    waits: bool = False
    """Whether the host waits for the device in such chunks, so that no CUDA graph has them."""

    @property
    def nbytes(self) -> int:
        """Bytes of one layer's state of one sequence."""
        return sum(tensor.nbytes for tensor in self.tensors)


def gated_delta(channels: int, taps: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> StateKind:
    """The state of a gated delta rule with its causal convolution (Qwen3.5): the convolution's inputs, and a matrix a head.

    dtype: the activations'. The matrices are in float32: they are sums over all tokens, which overflow in float16.
    """
    convolution = StateTensor((channels, taps - 1), dtype)
    matrices = StateTensor((heads, key_dim, value_dim), torch.float32)
    return StateKind("gated-delta", (convolution, matrices), is_chunked=True)


def short_convolution(channels: int, taps: int, dtype: torch.dtype) -> StateKind:
    """The state of a causal convolution alone (LFM2): its latest inputs."""
    return StateKind("convolution", (StateTensor((channels, taps - 1), dtype),), has_spare=True)


def mamba2(channels: int, taps: int, heads: int, state_dim: int, head_dim: int, dtype: torch.dtype) -> StateKind:
    """The state of Mamba2 with its causal convolution (Granite 4): the convolution's inputs, and a matrix a head.

    dtype: the activations'. The matrices are in float32, as those of gated_delta().
    """
    convolution = StateTensor((channels, taps - 1), dtype)
    matrices = StateTensor((heads, state_dim, head_dim), torch.float32)
    return StateKind("Mamba2", (convolution, matrices), is_chunked=True, waits=True)
