"""The CUDA kernels: calls libnf4_cuda.so (cuda_library.py) with tensors' pointers on torch's current stream.

Source: csrc/cuda/*.cu behind the C interface of csrc/params.h. load_error() says why when they cannot be used.
The first product on a device allocates its workspaces; let it run once before capturing a CUDA graph. In a captured graph
a product reads its weight and its norm's before the kernel in front of it has ended: nothing in the graph may write them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nf4_kernels.cuda_launches import (
    Around,
    Gate,
    can_gate,
    can_normalise,
    dequantize_into,
    multiply,
    multiply_gated,
    multiply_tiles,
    plan_on,
    start_clock,
    stop_clock,
)
from nf4_kernels.cuda_library import KernelError, load_error
from nf4_kernels.format import offset_stride
from nf4_kernels.params import DTYPES, Nf4Weight
from nf4_kernels.plan import Slices, Wgmma
from nf4_kernels.reference import arranged_rows, check_gate, gated, tiles_shape

__all__ = (
    "BLOCKSIZES",
    "KernelError",
    "arranged_linear",
    "dequantize",
    "fused_linear",
    "fuses",
    "gated_linear",
    "gates",
    "linear",
    "load_error",
    "plan_on",
    "start_clock",
    "stop_clock",
    "tile_rows",
)

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def dequantize(
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    dtype: torch.dtype,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """The weight as a tensor of shape and dtype (float32, float16, bfloat16), bit for bit as bitsandbytes gives it.

    packed: uint8 with (numel+1)//2 elements; absmax: float32, one per block, or one per 256 blocks beside absmax_8bit;
    absmax_offset: float32, one element or as many as absmax.
    ValueError for arguments no kernel takes; KernelError where the launch fails.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
    count = 1
    for size in shape:
        count *= size
    with torch.cuda.device(packed.device):
        weight = _weight(packed, 1, count, absmax, blocksize, absmax_8bit, absmax_code, absmax_offset)
        out = torch.empty(tuple(shape), dtype=dtype, device=packed.device)
        dequantize_into(out, weight, 0, count)
    return out


def linear(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """x [..., K] times the transposed weight [N, K] plus bias: [..., N] in x's dtype (float32, float16, bfloat16).

    The weight's arguments are those of dequantize(). ValueError and KernelError likewise.
    """
    return fused_linear(x, packed, shape, absmax, blocksize, bias, absmax_8bit, absmax_code, absmax_offset)


def fused_linear(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Tensor:
    """residual + linear() of x's rows, which are normalised first: x / sqrt(mean(x^2) + norm_eps) * norm_weight.

    residual [..., N] and norm_weight [K] are of x's dtype; without either it is linear(). In the product's own launches
    where fuses() says so, else in some of torch's before and after it. ValueError and KernelError as of linear().
    """
    n, k = _matrix(shape)
    _check_x(x, k, packed)
    _check_like(x, "bias", bias, (n,))
    _check_like(x, "residual", residual, (*x.shape[:-1], n))
    _check_like(x, "norm_weight", norm_weight, (k,))
    with torch.cuda.device(x.device):
        weight = _weight(packed, n, k, absmax, blocksize, absmax_8bit, absmax_code, absmax_offset)
        rows = x.reshape(-1, k)
        around = Around(bias, None if residual is None else residual.reshape(-1, n), norm_weight, norm_eps)
        out = torch.empty((rows.shape[0], n), dtype=x.dtype, device=x.device)
        if rows.shape[0] and n:
            multiply(out, rows, weight, around)
    return out.view(*x.shape[:-1], n)


def arranged_linear(
    tiles: Tensor,
    rows: int,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """fused_linear() of the x [rows, K], float16 or bfloat16, that is reference.arrange()d in tiles [_, _, tile, 64].

    Without a launch that arranges it where tile is what tile_rows() says, else x is put in order first. What tiles hold
    beyond rows is not read into any row; beyond K they hold zeros. ValueError and KernelError as of linear().
    """
    n, k = _matrix(shape)
    if tiles.ndim != 4 or tiles.dtype not in (torch.float16, torch.bfloat16) or tiles.device != packed.device:
        raise ValueError(f"tiles must be [_, _, tile, 64], float16 or bfloat16 on {packed.device}, got {tiles.dtype}")
    tile = tiles.shape[2]
    if tile == 0 or tuple(tiles.shape) != tiles_shape(rows, k, tile):
        raise ValueError(f"tiles have shape {tuple(tiles.shape)}, which is not that of {rows} rows of K = {k}")
    _check_like(tiles, "bias", bias, (n,))
    _check_like(tiles, "residual", residual, (rows, n))
    with torch.cuda.device(tiles.device):
        weight = _weight(packed, n, k, absmax, blocksize, absmax_8bit, absmax_code, absmax_offset)
        out = torch.empty((rows, n), dtype=tiles.dtype, device=tiles.device)
        around = Around(bias, residual, None, 0.0)
        if rows and n and not multiply_tiles(out, tiles, weight, around):
            multiply(out, arranged_rows(tiles, rows, k), weight, around)
    return out


def gated_linear(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    activation: str = "silu",
    tile: int = 0,
) -> Tensor:
    """activation(the first N / 2 columns of fused_linear()) times the others: [..., N / 2], as reference.gated() rounds.

    activation: one of params.ACTIVATIONS. tile: where not 0, rows come arrange()d in tiles [_, _, tile, 64] for
    arranged_linear(). In the product's own launches where gates() says so (with a tile: a power of two from 8 on, and N a
    multiple of 512), else in some of torch's behind it. ValueError and KernelError as of linear().
    """
    n, k = _matrix(shape)
    check_gate(n, activation, tile)
    _check_x(x, k, packed)
    _check_like(x, "bias", bias, (n,))
    _check_like(x, "norm_weight", norm_weight, (k,))
    with torch.cuda.device(x.device):
        weight = _weight(packed, n, k, absmax, blocksize, absmax_8bit, absmax_code, absmax_offset)
        rows = x.reshape(-1, k)
        m, columns = rows.shape[0], n // 2
        out = x.new_empty(tiles_shape(m, columns, tile) if tile else (m, columns))
        around = Around(bias, None, norm_weight, norm_eps)
        if out.numel() and not multiply_gated(out, rows, weight, around, Gate(activation, tile)):
            gate_up = x.new_empty(m, n)
            multiply(gate_up, rows, weight, around)
            out = gated(gate_up, activation, tile)
    return out if tile else out.view(*x.shape[:-1], columns)


def tile_rows(
    device: torch.device, dtype: torch.dtype, rows: int, shape: Sequence[int], blocksize: int, nested: bool
) -> int:
    """The tile with which arranged_linear() of rows on a device of this machine arranges nothing; 0: it always does."""
    n, k = _matrix(shape)
    if load_error() is not None or dtype == torch.float32 or n * k == 0:
        return 0
    choice = plan_on(device, rows, n, k, blocksize, nested)
    return choice.tokens if isinstance(choice, Wgmma) else 0


def fuses(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    shape: Sequence[int],
    blocksize: int,
    nested: bool,
    normalised: bool,
) -> bool:
    """Whether fused_linear() of x [rows, K] on a device of this machine needs no launches of torch's."""
    n, k = _matrix(shape)
    if load_error() is not None or dtype == torch.float32 or (normalised and not can_normalise(dtype, k)):
        return False
    return not isinstance(plan_on(device, rows, n, k, blocksize, nested, normalised), Slices)


def gates(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    shape: Sequence[int],
    blocksize: int,
    nested: bool,
    normalised: bool,
) -> bool:
    """Whether gated_linear() of x [rows, K], in rows, on a device of this machine needs no launches of torch's."""
    n, k = _matrix(shape)
    if not can_gate(dtype, n) or not fuses(device, dtype, rows, shape, blocksize, nested, normalised):
        return False
    return isinstance(plan_on(device, rows, n, k, blocksize, nested, normalised), Wgmma)


def _check_x(x: Tensor, k: int, packed: Tensor) -> None:
    """ValueError where x [..., k] is not what products of a weight at packed's place take."""
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be float32, float16 or bfloat16, got {x.dtype}")
    if x.ndim == 0 or x.shape[-1] != k:
        raise ValueError(f"x has shape {tuple(x.shape)}; its last dimension must be K = {k}")
    if x.device != packed.device:
        raise ValueError(f"x is on {x.device}, the weight on {packed.device}")


def _check_like(x: Tensor, name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    """ValueError where a tensor is given and is not of that shape and of x's dtype and device."""
    if tensor is not None and (tensor.shape != shape or tensor.dtype != x.dtype or tensor.device != x.device):
        raise ValueError(f"{name} must be {x.dtype} of shape {shape} on {x.device}")


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    if len(shape) != 2:
        raise ValueError(f"shape must be [N, K], got {list(shape)}")
    return int(shape[0]), int(shape[1])


def _weight(
    packed: Tensor,
    n: int,
    k: int,
    absmax: Tensor,
    blocksize: int,
    absmax_8bit: Tensor | None,
    absmax_code: Tensor | None,
    absmax_offset: Tensor | None,
) -> Nf4Weight:
    if blocksize not in BLOCKSIZES:
        raise ValueError(f"blocksize must be one of {BLOCKSIZES}, got {blocksize}")
    blocks = -(-n * k // blocksize)
    _check("packed", packed, packed.device, torch.uint8, (n * k + 1) // 2)
    if absmax_8bit is None:
        _check("absmax", absmax, packed.device, torch.float32, blocks)
        return Nf4Weight(packed=packed.data_ptr(), absmax=absmax.data_ptr(), n=n, k=k, blocksize=blocksize)
    if absmax_code is None or absmax_offset is None:
        raise ValueError("absmax_8bit needs absmax_code and absmax_offset beside it")
    _check("absmax_8bit", absmax_8bit, packed.device, torch.uint8, blocks)
    _check("absmax", absmax, packed.device, torch.float32, -(-blocks // 256))
    _check("absmax_code", absmax_code, packed.device, torch.float32, 256)
    _check("absmax_offset", absmax_offset, packed.device, torch.float32, 1)
    stride = offset_stride(absmax, absmax_offset)
    return Nf4Weight(
        packed=packed.data_ptr(),
        absmax=absmax.data_ptr(),
        absmax_8bit=absmax_8bit.data_ptr(),
        absmax_code=absmax_code.data_ptr(),
        absmax_offset=absmax_offset.data_ptr(),
        n=n,
        k=k,
        blocksize=blocksize,
        offset_stride=stride,
    )


def _check(name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype, elements: int) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.device != device or device.type != "cuda":
        raise ValueError(f"{name} is on {tensor.device}; the whole weight must be on one CUDA device")
    if tensor.numel() < elements:
        raise ValueError(f"{name} has {tensor.numel()} elements, the weight needs {elements}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")
