"""One launch between the projections of latent attention and what attends."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from nf4_kernels.cuda.device import capability
from server.engine.runtime.attention.rotary import RotaryEmbedding


def normalise_and_rotate(
    query: torch.Tensor,
    latent: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    rotary: RotaryEmbedding,
) -> torch.Tensor:
    """Rotate the last columns of query in place; latents [T, 1, rank + rotary] with their norm and rotary embedding.

    query [T, heads, plain + rotary] and latent [T, rank + rotary] on CUDA, contiguous last dimensions. weight [rank], eps,
    offset: of RmsNorm. rotary: with angles [T, rotary], without norms; rotary columns are twice a power of 2. Computed in
    float32 and rounded once.
    """
    tokens, heads, dim = query.shape
    rank, columns = len(weight), rotary.cos.shape[-1]
    half = columns // 2
    # Of a pair the places of both elements, and of its angles, which the elements of neighbours share.
    pairs = (2, 1, rotary.angle_step, 0) if rotary.angle_step else (1, half, 1, half)
    out = latent.new_empty(tokens, 1, rank + columns)
    _normalise_and_rotate[(tokens,)](
        query,
        latent,
        out,
        weight,
        rotary.cos,
        rotary.sin,
        *query.stride()[:2],
        latent.stride(0),
        rotary.cos.stride(0),
        eps,
        offset,
        heads,
        triton.next_power_of_2(heads),
        dim - columns,
        rank,
        triton.next_power_of_2(rank),
        half,
        *pairs,
        overlap := capability(query.device)[0] >= 9,
        num_warps=4,
        launch_pdl=overlap,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _normalise_and_rotate(  # type: ignore[no-untyped-def]
    query,
    latent,
    out,
    weight,
    cosines,
    sines,
    query_token,
    query_head,
    latent_token,
    angles_token,
    eps,
    offset,
    heads: tl.constexpr,
    heads_width: tl.constexpr,
    plain: tl.constexpr,
    rank: tl.constexpr,
    rank_width: tl.constexpr,
    half: tl.constexpr,
    step: tl.constexpr,
    apart: tl.constexpr,
    angle_step: tl.constexpr,
    angles_apart: tl.constexpr,
    overlap: tl.constexpr,
):
    # A thread block takes one token.
    if overlap:  # docs/adr/0010-pdl-and-weight-prefetch.md
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    pair, head, column = tl.arange(0, half), tl.arange(0, heads_width), tl.arange(0, rank_width)
    at = token * angles_token + pair * angle_step
    angles = (
        tl.load(cosines + at).to(tl.float32),
        tl.load(sines + at).to(tl.float32),
        tl.load(cosines + at + angles_apart).to(tl.float32),
        tl.load(sines + at + angles_apart).to(tl.float32),
    )
    own = latent + token * latent_token
    inside = column < rank
    x = tl.load(own + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    target = out + token * (rank + 2 * half)
    result = x * tl.rsqrt(tl.sum(x * x, 0) / rank + eps) * scale
    tl.store(target + column, result.to(out.dtype.element_ty), mask=inside)
    _rotate(
        own + rank + pair[None, :] * step, target + rank + pair[None, :] * step, apart, angles, pair[None, :] < half
    )
    places = query + token * query_token + head[:, None] * query_head + plain + pair[None, :] * step
    _rotate(places, places, apart, angles, (head < heads)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(source, target, apart: tl.constexpr, angles, inside):  # type: ignore[no-untyped-def]
    """Write pairs of elements, rotated; a pair's second element is `apart` after its first."""
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + apart, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = target.dtype.element_ty
    tl.store(target, (first * angles[0][None, :] - second * angles[1][None, :]).to(dtype), mask=inside)
    tl.store(target + apart, (second * angles[2][None, :] + first * angles[3][None, :]).to(dtype), mask=inside)
