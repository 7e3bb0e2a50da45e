"""The CUDA kernels: calls libnf4_cuda.so (library.py) with tensors' pointers on torch's current stream.

Source: csrc/cuda/ behind the C interface of csrc/params.h. load_error() says why when they cannot be used.
The first GEMM on a device allocates its workspaces; let it run once before capturing a CUDA graph. In a captured graph
a GEMM reads its weight and its norm's before the kernel in front of it has ended: nothing in the graph may write them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nf4_kernels.cuda.clocks import start_clock, stop_clock
from nf4_kernels.cuda.launches import (
    Fusion,
    Gate,
    can_norm,
    can_write_gated,
    dequantize_into,
    gemm,
    gemm_gated,
    gemm_tiled,
    has_gate,
    plan_on,
)
from nf4_kernels.cuda.library import KernelError, load_error
from nf4_kernels.format import Weight, nested_groups, second_level
from nf4_kernels.params import DTYPES, Nf4Weight, weight_struct
from nf4_kernels.plan import Dequantize, Wgmma
from nf4_kernels.reference import check_gate, gated, tiles_shape, untile_activations

__all__ = (
    "BLOCKSIZES",
    "KernelError",
    "can_fuse",
    "can_gate",
    "dequantize",
    "fused_linear",
    "gated_linear",
    "linear",
    "load_error",
    "plan_on",
    "start_clock",
    "stop_clock",
    "tiled_linear",
    "token_tile",
)

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight as a tensor of its shape and dtype (float32, float16, bfloat16), bit for bit as bitsandbytes gives it.

    ValueError for arguments no kernel takes; KernelError where the launch fails.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
    count = 1
    for size in weight.shape:
        count *= size
    device = weight.packed.device
    with torch.cuda.device(device):
        struct = struct_of(weight, *(weight.matrix if weight.group_skip else (1, count)))
        out = torch.empty(tuple(weight.shape), dtype=dtype, device=device)
        dequantize_into(out, struct, 0, count)
    return out


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times the transposed weight [N, K] plus bias: [..., N] in x's dtype (float32, float16, bfloat16).

    Raises ValueError and KernelError as dequantize() does.
    """
    return fused_linear(x, weight, bias)


def fused_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Tensor:
    """residual + linear() of x's tokens, which are normalised first: x / sqrt(mean(x^2) + norm_eps) * norm_weight.

    residual [..., N] and norm_weight [K] are of x's dtype; without either it is linear(). This is in the GEMM's own
    launches where can_fuse() says so; elsewhere torch's operations run before and after it. Raises ValueError and
    KernelError as linear() does.
    """
    n, k = weight.matrix
    _check_x(x, k, weight)
    _check_like(x, "bias", bias, (n,))
    _check_like(x, "residual", residual, (*x.shape[:-1], n))
    _check_like(x, "norm_weight", norm_weight, (k,))
    with torch.cuda.device(x.device):
        struct = struct_of(weight, n, k)
        tokens = x.reshape(-1, k)
        fusion = Fusion(bias, None if residual is None else residual.reshape(-1, n), norm_weight, norm_eps)
        out = torch.empty((tokens.shape[0], n), dtype=x.dtype, device=x.device)
        if tokens.shape[0] and n:
            gemm(out, tokens, struct, fusion)
    return out.view(*x.shape[:-1], n)


def tiled_linear(
    tiles: Tensor, tokens: int, weight: Weight, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """fused_linear() of the x [tokens, K], float16 or bfloat16, whose tiled activations are tiles [_, _, tile, 64].

    Where tile is what token_tile() says, no launch tiles x; else x is first brought into row-major order. What tiles
    hold beyond the tokens changes no result; beyond K they must hold zeros. Raises ValueError and KernelError as
    linear() does.
    """
    n, k = weight.matrix
    device = weight.packed.device
    if tiles.ndim != 4 or tiles.dtype not in (torch.float16, torch.bfloat16) or tiles.device != device:
        raise ValueError(f"tiles must be [_, _, tile, 64], float16 or bfloat16 on {device}, got {tiles.dtype}")
    tile = tiles.shape[2]
    if tile == 0 or tuple(tiles.shape) != tiles_shape(tokens, k, tile):
        raise ValueError(f"tiles have shape {tuple(tiles.shape)}, which is not that of {tokens} tokens of K = {k}")
    _check_like(tiles, "bias", bias, (n,))
    _check_like(tiles, "residual", residual, (tokens, n))
    with torch.cuda.device(tiles.device):
        struct = struct_of(weight, n, k)
        out = torch.empty((tokens, n), dtype=tiles.dtype, device=tiles.device)
        fusion = Fusion(bias, residual, None, 0.0)
        if tokens and n and not gemm_tiled(out, tiles, struct, fusion):
            gemm(out, untile_activations(tiles, tokens, k), struct, fusion)
    return out


def gated_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    activation: str = "silu",
    tile: int = 0,
) -> Tensor:
    """activation(the first N / 2 columns of fused_linear()) times the others: [..., N / 2], as reference.gated() rounds.

    activation: one of params.ACTIVATIONS. tile: where not 0, the result is tiled activations [_, _, tile, 64] for
    tiled_linear(). This is in the GEMM's own launches where can_gate() says so (with a tile: a multiple of 8, and N a
    multiple of 512); elsewhere torch's operations run after it. Raises ValueError and KernelError as linear() does.
    """
    n, k = weight.matrix
    check_gate(n, activation, tile)
    _check_x(x, k, weight)
    _check_like(x, "bias", bias, (n,))
    _check_like(x, "norm_weight", norm_weight, (k,))
    with torch.cuda.device(x.device):
        struct = struct_of(weight, n, k)
        tokens = x.reshape(-1, k)
        m, columns = tokens.shape[0], n // 2
        out = x.new_empty(tiles_shape(m, columns, tile) if tile else (m, columns))
        fusion = Fusion(bias, None, norm_weight, norm_eps)
        if out.numel() and not gemm_gated(out, tokens, struct, fusion, Gate(activation, tile)):
            gate_up = x.new_empty(m, n)
            gemm(gate_up, tokens, struct, fusion)
            out = gated(gate_up, activation, tile)
    return out if tile else out.view(*x.shape[:-1], columns)


def token_tile(
    device: torch.device, dtype: torch.dtype, tokens: int, shape: Sequence[int], blocksize: int, nested: bool
) -> int:
    """The token tile with which tiled_linear() needs no launch that tiles x on that device; 0 if there is none."""
    n, k = _matrix(shape)
    if device.type != "cuda" or load_error() is not None or dtype == torch.float32 or n * k == 0:
        return 0
    choice = plan_on(device, tokens, n, k, blocksize, nested)
    return choice.tokens if isinstance(choice, Wgmma) else 0


def can_fuse(
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    shape: Sequence[int],
    blocksize: int,
    nested: bool,
    normalised: bool,
) -> bool:
    """Whether fused_linear() of x [tokens, K] on that device needs no launches by torch."""
    n, k = _matrix(shape)
    if device.type != "cuda" or load_error() is not None or dtype == torch.float32:
        return False
    if normalised and not can_norm(dtype, k):
        return False
    return not isinstance(plan_on(device, tokens, n, k, blocksize, nested, normalised), Dequantize)


def can_gate(
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    shape: Sequence[int],
    blocksize: int,
    nested: bool,
    normalised: bool,
) -> bool:
    """Whether gated_linear() of x [tokens, K], without a tile, on that device needs no launches by torch."""
    n, k = _matrix(shape)
    if not can_write_gated(dtype, n) or not can_fuse(device, dtype, tokens, shape, blocksize, nested, normalised):
        return False
    return has_gate(plan_on(device, tokens, n, k, blocksize, nested, normalised, gated=True), normalised)


def _check_x(x: Tensor, k: int, weight: Weight) -> None:
    """ValueError where x [..., k] is not what GEMMs with that weight take."""
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be float32, float16 or bfloat16, got {x.dtype}")
    if x.ndim == 0 or x.shape[-1] != k:
        raise ValueError(f"x has shape {tuple(x.shape)}; its last dimension must be K = {k}")
    if x.device != weight.packed.device:
        raise ValueError(f"x is on {x.device}, the weight on {weight.packed.device}")


def _check_like(x: Tensor, name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    """ValueError where a tensor is given and is not of that shape and of x's dtype and device."""
    if tensor is not None and (tensor.shape != shape or tensor.dtype != x.dtype or tensor.device != x.device):
        raise ValueError(f"{name} must be {x.dtype} of shape {shape} on {x.device}")


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    if len(shape) != 2:
        raise ValueError(f"shape must be [N, K], got {list(shape)}")
    return int(shape[0]), int(shape[1])


def struct_of(weight: Weight, n: int, k: int) -> Nf4Weight:
    """The C interface's view of a weight's tensors, as n rows of k. ValueError names what does not fit."""
    if weight.table != "nf4":
        raise ValueError(f"the CUDA kernels take NF4 alone, got {weight.table}")
    if weight.blocksize not in BLOCKSIZES:
        raise ValueError(f"blocksize must be one of {BLOCKSIZES}, got {weight.blocksize}")
    packed, absmax, device = weight.packed, weight.absmax, weight.packed.device
    blocks = -(-n * k // weight.blocksize)
    _check("packed", packed, device, torch.uint8, (n * k + 1) // 2)
    if weight.absmax_8bit is None:
        _check("absmax", absmax, device, torch.float32, blocks)
        return weight_struct(weight, n, k, None)
    nested = second_level(weight)
    absmax_8bit, absmax_code, absmax_offset, _ = nested
    _check("absmax_8bit", absmax_8bit, device, torch.uint8, blocks)
    _check("absmax", absmax, device, torch.float32, nested_groups(weight, blocks))
    _check("absmax_code", absmax_code, device, torch.float32, 256)
    _check("absmax_offset", absmax_offset, device, torch.float32, 1)
    return weight_struct(weight, n, k, nested)


def _check(name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype, elements: int) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.device != device or device.type != "cuda":
        raise ValueError(f"{name} is on {tensor.device}; the whole weight must be on one CUDA device")
    if tensor.numel() < elements:
        raise ValueError(f"{name} has {tensor.numel()} elements, the weight needs {elements}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")
