"""The pointwise launches of a layer that no GEMM and no attention takes over, in Triton."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.language.extra import libdevice  # type: ignore[import-not-found,import-untyped,unused-ignore]

from nf4_kernels.cuda.device import capability

_GATE_COLUMNS = 1024


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """residual + x / sqrt(mean(x^2) + eps) * (weight + offset), [T, width], in float32 and rounded once.

    x and residual [T, width], rows contiguous, weight [width], of one dtype on CUDA.
    """
    tokens, width = x.shape
    out = x.new_empty(tokens, width)
    block = triton.next_power_of_2(width)
    overlap = _overlaps(x.device)
    _rms_norm[(tokens,)](
        x,
        weight,
        out if residual is None else residual,
        out,
        x.stride(0),
        out.stride(0) if residual is None else residual.stride(0),
        eps,
        offset,
        width,
        block,
        residual is not None,
        overlap,
        num_warps=min(16, max(1, block // 512)),
        launch_pdl=overlap,
    )
    return out


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y, contiguous and of one shape and dtype, on CUDA.

    torch's own launch would neither begin before the one in front has ended nor let the one behind it do so.
    """
    out = torch.empty_like(x)
    overlap = _overlaps(x.device)
    _add[(triton.cdiv(x.numel(), _GATE_COLUMNS),)](
        x, y, out, x.numel(), _GATE_COLUMNS, overlap, num_warps=4, launch_pdl=overlap
    )
    return out


def add_gated(
    x: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, y: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    """residual + y + sigmoid(x @ weight) * z, [T, width], in float32 and rounded once.

    weight [width]; the others [T, width], rows contiguous, of one dtype on CUDA.
    """
    tokens, width = x.shape
    out = x.new_empty(tokens, width)
    overlap, added = _overlaps(x.device), y if residual is None else residual
    _add_gated[(tokens,)](
        *(x, weight, z, y, added, out, x.stride(0), z.stride(0), y.stride(0), added.stride(0)),
        *(width, triton.next_power_of_2(width), residual is not None, overlap),
        num_warps=4,
        launch_pdl=overlap,
    )
    return out


def gate_heads(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x times the sigmoid of gate, both [T, heads, dim] of one dtype on CUDA; x contiguous, gate's last dimension, too.

    The sigmoid is rounded before the product, as models do.
    """
    tokens, heads, dim = x.shape
    out, overlap = torch.empty_like(x), _overlaps(x.device)
    _gate_heads[(tokens, triton.cdiv(heads * dim, _GATE_COLUMNS))](
        *(x, gate, out, *gate.stride()[:2], heads * dim, dim, _GATE_COLUMNS, overlap), num_warps=4, launch_pdl=overlap
    )
    return out


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up, [T, f], of gate_up [T, 2 f], contiguous; activation: "silu" or "gelu_tanh".

    The activation is rounded before the product, as models do.
    """
    tokens, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, columns)
    overlap = _overlaps(gate_up.device)
    _gated[(tokens, triton.cdiv(columns, _GATE_COLUMNS))](
        gate_up, out, columns, _GATE_COLUMNS, activation, overlap, num_warps=4, launch_pdl=overlap
    )
    return out


def angles(
    positions: torch.Tensor, frequencies: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of positions * frequencies, times scaling, [T, 2 * half] with both halves equal, in dtype.

    positions int64 [T], frequencies float32 [half], on CUDA. The product is rounded to float32, as transformers does.
    """
    tokens, half = positions.shape[0], frequencies.shape[0]
    cos = torch.empty(tokens, 2 * half, dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    overlap = _overlaps(positions.device)
    _angles[(tokens,)](
        positions,
        frequencies,
        cos,
        sin,
        scaling,
        half,
        triton.next_power_of_2(half),
        overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
    return cos, sin


def _overlaps(device: torch.device) -> bool:
    """Whether kernels may start by programmatic dependent launch."""
    return capability(device)[0] >= 9


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(  # type: ignore[no-untyped-def]
    x,
    weight,
    residual,
    out,
    x_pitch,
    residual_pitch,
    eps,
    offset,
    width: tl.constexpr,
    block: tl.constexpr,
    adds: tl.constexpr,
    overlap: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    # A parameter, which no launch writes: it may be read before the launch in front has ended.
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    wide = tl.load(x + token * x_pitch + column, mask=inside, other=0.0).to(tl.float32)
    result = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps) * scale
    if adds:
        result += tl.load(residual + token * residual_pitch + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, result, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _add(x, y, out, elements, block: tl.constexpr, overlap: tl.constexpr):  # type: ignore[no-untyped-def]
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < elements
    left = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, left + right, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _add_gated(  # type: ignore[no-untyped-def]
    x,
    weight,
    z,
    y,
    residual,
    out,
    x_stride,
    z_stride,
    y_stride,
    residual_stride,
    width: tl.constexpr,
    block: tl.constexpr,
    adds: tl.constexpr,
    overlap: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    # A parameter, which no launch writes.
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    logit = tl.sum(tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32) * scale, 0)
    result = tl.load(z + token * z_stride + column, mask=inside, other=0.0).to(tl.float32) * tl.sigmoid(logit)
    result += tl.load(y + token * y_stride + column, mask=inside, other=0.0).to(tl.float32)
    if adds:
        result += tl.load(residual + token * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, result, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_heads(  # type: ignore[no-untyped-def]
    x, gate, out, token_stride, head_stride, columns, dim: tl.constexpr, block: tl.constexpr, overlap: tl.constexpr
):
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    of_gate = gate + token * token_stride + column // dim * head_stride + column % dim
    share = tl.sigmoid(tl.load(of_gate, mask=inside, other=0.0).to(tl.float32)).to(out.dtype.element_ty).to(tl.float32)
    result = tl.load(x + token * columns + column, mask=inside, other=0.0).to(tl.float32) * share
    tl.store(out + token * columns + column, result, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gated(  # type: ignore[no-untyped-def]
    gate_up, out, columns, block: tl.constexpr, activation: tl.constexpr, overlap: tl.constexpr
):
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    gate = tl.load(gate_up + token * 2 * columns + column, mask=inside, other=0.0)
    up = tl.load(gate_up + token * 2 * columns + columns + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    if activation == "silu":
        activated = wide / (1.0 + tl.exp(-wide))
    else:
        bent = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
        activated = wide / (1.0 + tl.exp(-2.0 * bent))
    result = activated.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + token * columns + column, result, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _angles(  # type: ignore[no-untyped-def]
    positions, frequencies, cosines, sines, scaling, half: tl.constexpr, width: tl.constexpr, overlap: tl.constexpr
):
    column = tl.arange(0, width)
    inside = column < half
    frequency = tl.load(frequencies + column, mask=inside, other=0.0)
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    angle = tl.load(positions + token).to(tl.float32) * frequency
    cos, sin = libdevice.cos(angle) * scaling, libdevice.sin(angle) * scaling
    place = token * 2 * half + column
    tl.store(cosines + place, cos, mask=inside)
    tl.store(cosines + place + half, cos, mask=inside)
    tl.store(sines + place, sin, mask=inside)
    tl.store(sines + place + half, sin, mask=inside)
