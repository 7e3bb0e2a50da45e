"""Launches of the CUDA kernels: which of them computes a GEMM, its workspace, its times. The package checks arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import TypeGuard

import torch
from torch import Tensor

from nf4_kernels.cuda.clocks import clock_words
from nf4_kernels.cuda.device import arch, index_of
from nf4_kernels.cuda.library import Linear, launch, raise_for, usable
from nf4_kernels.cuda.workspace import workspace_on
from nf4_kernels.params import ACTIVATIONS, DTYPES, Nf4Weight
from nf4_kernels.plan import (
    NORM_K,
    Dequantize,
    Mma,
    Plan,
    Rows,
    Wgmma,
    candidates,
)
from nf4_kernels.plan.measured import Times, measured_choice, shape_name
from nf4_kernels.reference import rms_norm


@dataclasses.dataclass(frozen=True)
class Gate:
    """A gated activation (params.ACTIVATIONS) of the first half of N columns, which is multiplied by the second half."""

    activation: str
    tile: int
    """0: the result is [M, N / 2]; else its tiled activations (reference.tile_activations())."""


@dataclasses.dataclass(frozen=True)
class Fusion:
    """Operations in a GEMM's own launches: its prologue (the norm of x) and its epilogue (all else); None leaves it out."""

    bias: Tensor | None
    residual: Tensor | None
    norm_weight: Tensor | None
    norm_eps: float
    gate: Gate | None = None


def can_norm(dtype: torch.dtype, k: int) -> bool:
    """Whether a GEMM's launches can normalise tokens of k elements. In float16, x times norm_weight could overflow."""
    return dtype == torch.bfloat16 and k <= NORM_K


def can_write_gated(dtype: torch.dtype, n: int, tile: int = 0) -> bool:
    """Whether GEMMs can write the gated activation of n sums; tile: the result's tokens a tile, 0 if row-major."""
    tiled = tile == 0 or (tile >= 8 and tile % 8 == 0 and n % 512 == 0)
    return dtype == torch.bfloat16 and n % 16 == 0 and tiled


def has_gate(choice: Plan, normalised: bool) -> TypeGuard[Rows | Wgmma | Mma]:
    """Whether a launch computes the gated activation: linear_rows only behind a norm."""
    return isinstance(choice, Wgmma | Mma) or (isinstance(choice, Rows) and normalised)


def gemm(out: Tensor, x: Tensor, weight: Nf4Weight, fusion: Fusion) -> None:
    """out [M, N] = fusion.residual + x [M, K], normalised if asked for, times the transposed weight, plus fusion.bias."""
    m, n, k = x.shape[0], weight.n, weight.k
    if fusion.norm_weight is not None and not can_norm(x.dtype, k):
        x = rms_norm(x, fusion.norm_weight, fusion.norm_eps)
        fusion = dataclasses.replace(fusion, norm_weight=None)
    nested, normalised = weight.absmax_8bit is not None, fusion.norm_weight is not None
    gemm_by(plan_on(x.device, m, n, k, weight.blocksize, nested, normalised), out, x, weight, fusion)


def gemm_by(choice: Plan, out: Tensor, x: Tensor, weight: Nf4Weight, fusion: Fusion) -> None:
    """Compute gemm() by a choice, or by dequantization where its launch cannot; a norm must be one that can_norm() takes."""
    if not isinstance(choice, Dequantize) and x.dtype != torch.float32:
        workspace = workspace_on(x.device)
        if _is_aligned(weight) and (isinstance(choice, Rows) or workspace is not None):
            _launch(out, x.shape[0], aligned(x), None, weight, fusion, choice, workspace)
            return
    if fusion.norm_weight is not None:
        x = rms_norm(x, fusion.norm_weight, fusion.norm_eps)
    _gemm_in_slices(out, x, weight, fusion.bias, choice.rows if isinstance(choice, Dequantize) else weight.n)
    if fusion.residual is not None:
        out += fusion.residual


def gemm_tiled(out: Tensor, tiles: Tensor, weight: Nf4Weight, fusion: Fusion) -> bool:
    """Compute what gemm() does, from tiled activations of x. False, with nothing done, where no launch takes them."""
    m = out.shape[0]
    choice = plan_on(out.device, m, weight.n, weight.k, weight.blocksize, weight.absmax_8bit is not None)
    workspace = workspace_on(out.device)
    if not isinstance(choice, Wgmma) or choice.tokens != tiles.shape[2] or not _is_aligned(weight) or workspace is None:
        return False
    _launch(out, m, None, aligned(tiles), weight, fusion, choice, workspace)
    return True


def gemm_gated(out: Tensor, x: Tensor, weight: Nf4Weight, fusion: Fusion, gate: Gate) -> bool:
    """Compute what gemm() does, with the gate in the epilogue. False, with nothing done, where no launch has it."""
    m, n, k, normalised = x.shape[0], weight.n, weight.k, fusion.norm_weight is not None
    if not can_write_gated(x.dtype, n, gate.tile) or (normalised and not can_norm(x.dtype, k)):
        return False
    choice = plan_on(x.device, m, n, k, weight.blocksize, weight.absmax_8bit is not None, normalised, gated=True)
    workspace = workspace_on(x.device)
    if not has_gate(choice, normalised) or not _is_aligned(weight) or workspace is None:
        return False
    _launch(out, m, aligned(x), None, weight, dataclasses.replace(fusion, gate=gate), choice, workspace)
    return True


def plan_on(
    device: torch.device,
    m: int,
    n: int,
    k: int,
    blocksize: int = 64,
    nested: bool = True,
    normalised: bool = False,
    gated: bool = False,
) -> Plan:
    """The choice for a CUDA device of this machine (16-bit types): by its measured times if there are any, else plan()'s.

    gated: among launches that compute a gated activation, and dequantization. The launch that is a little faster without one
    loses more to the operations that then follow it.
    """
    return _plan(index_of(device), m, n, k, blocksize, nested, normalised, gated)


def candidates_on(
    device: torch.device, m: int, n: int, k: int, blocksize: int, nested: bool
) -> list[tuple[Plan, float]]:
    """candidates() for a CUDA device of this machine."""
    return list(candidates(m, n, k, *_properties(index_of(device)), blocksize, nested))


@functools.lru_cache(maxsize=4096)
def _plan(index: int, m: int, n: int, k: int, blocksize: int, nested: bool, normalised: bool, gated: bool) -> Plan:
    def options(tokens: int) -> Iterator[tuple[Plan, float]]:
        for choice, cost in candidates(tokens, n, k, *_properties(index), blocksize, nested, normalised):
            if not gated or has_gate(choice, normalised) or isinstance(choice, Dequantize):
                yield choice, cost

    times = _times.get(index, {}).get(shape_name(n, k, blocksize, nested), {})
    return measured_choice(m, times, options)


_times: dict[int, Mapping[str, Times]] = {}


def use_times(device: torch.device, times: Mapping[str, Times]) -> None:
    """From here on choose launches on device by these times, by shape_name(); of other shapes by fitted costs.

    What was captured in graphs, or decided by an earlier choice, stays as it is.
    """
    _times[index_of(device)] = times
    _plan.cache_clear()


@functools.cache
def _properties(index: int) -> tuple[int, int]:
    device = torch.device("cuda", index)
    return arch(device), torch.cuda.get_device_properties(device).multi_processor_count


def _launch(
    out: Tensor,
    m: int,
    x: Tensor | None,
    tiles: Tensor | None,
    weight: Nf4Weight,
    fusion: Fusion,
    choice: Rows | Wgmma | Mma,
    workspace: tuple[Tensor, Tensor] | None,
) -> None:
    device = out.device
    scratch, counters = workspace or (None, None)
    if isinstance(choice, Wgmma | Mma):
        needed = choice.workspace_bytes(m, weight.n, weight.k)
        if scratch is None or needed > scratch.numel():
            scratch = torch.empty(needed, dtype=torch.uint8, device=device)
    words, timed = clock_words(device, "wgmma" if isinstance(choice, Wgmma) else "rows")
    gate = fusion.gate
    # Only such kernels are compiled a second time.
    timed = timed and gate is None and fusion.norm_weight is None and out.dtype == torch.bfloat16
    bias, residual, norm_weight = (
        None if tensor is None else aligned(tensor) for tensor in (fusion.bias, fusion.residual, fusion.norm_weight)
    )

    linear = Linear(
        weight=weight,
        x=None if x is None else x.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        workspace=None if scratch is None else scratch.data_ptr(),
        counters=None if counters is None else counters.data_ptr(),
        m=m,
        dtype=DTYPES[out.dtype],
        constant_weights=torch.cuda.is_current_stream_capturing(),
        stream=torch.cuda.current_stream(device).cuda_stream,
        clock=words,
        residual=None if residual is None else residual.data_ptr(),
        norm_weight=None if norm_weight is None else norm_weight.data_ptr(),
        norm_eps=fusion.norm_eps,
        tiles=None if tiles is None else tiles.data_ptr(),
        activation=0 if gate is None else ACTIVATIONS[gate.activation],
        out_tile=0 if gate is None else gate.tile,
    )
    # A Mma's time counts as linear_rows'; its decoding is not timed.
    launch(choice, linear, timed and not isinstance(choice, Mma))


def _gemm_in_slices(out: Tensor, x: Tensor, weight: Nf4Weight, bias: Tensor | None, rows: int) -> None:
    n, k = weight.n, weight.k
    buffer = torch.empty((min(rows, n), k), dtype=x.dtype, device=x.device)
    whole, _ = clock_words(x.device, "slices")
    for first in range(0, n, rows):
        last = min(first + rows, n)
        dense = buffer[: last - first]
        dequantize_into(dense, weight, first * k, (last - first) * k, whole if first == 0 else None)
        if bias is None:
            torch.mm(x, dense.t(), out=out[:, first:last])
        else:
            torch.addmm(bias[first:last], x, dense.t(), out=out[:, first:last])
    if whole is not None:
        loaded = usable()
        status = loaded.nf4_cuda_clock_end(whole, torch.cuda.current_stream(x.device).cuda_stream)
        raise_for(loaded, status, "clock")


def _is_aligned(weight: Nf4Weight) -> bool:
    addresses = weight.packed, weight.absmax, weight.absmax_8bit or 0, weight.absmax_code or 0
    return all(address % 16 == 0 for address in addresses)


def aligned(x: Tensor) -> Tensor:
    """x, contiguous and at an address that is a multiple of 16; itself if it is so already."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def dequantize_into(out: Tensor, weight: Nf4Weight, first: int, count: int, whole: int | None = None) -> None:
    """Write count elements of the weight, from first on, to out.

    whole: the clock words of the GEMM that this launch begins.
    """
    stream = torch.cuda.current_stream(out.device).cuda_stream
    loaded = usable()
    words, _ = clock_words(out.device, "dequantize")
    status = loaded.nf4_cuda_dequantize(weight, first, count, out.data_ptr(), DTYPES[out.dtype], stream, words, whole)
    raise_for(loaded, status, "dequantize")
