"""One launch that normalises and rotates a step's queries and keys, where the launch that attends does not."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from nf4_kernels.cuda.device import capability
from server.engine.runtime.attention.rotary import RotaryEmbedding

_ELEMENTS = 2048
"""Elements of one thread block's heads, at most; a head of more is one block's alone."""


def rotate(rotary: RotaryEmbedding, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """RotaryEmbedding.apply() in one launch: query [T, heads, dim] and key [T, kv_heads, dim], contiguous results.

    16-bit or float32 on CUDA, any strides with a contiguous last dimension. The angles may be those of a head's first
    columns only; the others are not rotated.
    """
    tokens, heads, dim = query.shape
    kv_heads, half = key.shape[1], rotary.cos.shape[-1] // 2
    width = triton.next_power_of_2(half)
    rest = dim - 2 * half
    # Of a pair the places of both elements, and of its angles, which the elements of neighbours share.
    neighbours = (2, 1, rotary.angle_step, 0)
    pairs = neighbours if rotary.angle_step else (1, half, 1, half)
    group = max(1, _ELEMENTS // triton.next_power_of_2(dim))
    group = min(group, triton.next_power_of_2(max(heads, kv_heads)))
    queries, keys = -(-heads // group), -(-kv_heads // group)
    new_query, new_key = query.new_empty(query.shape), key.new_empty(key.shape)
    norms = rotary.norms
    _rotate[(tokens, queries + keys)](
        query,
        key,
        new_query,
        new_key,
        rotary.cos,
        rotary.sin,
        *(norms or (query, query)),
        *query.stride()[:2],
        *key.stride()[:2],
        rotary.cos.stride(0),
        rotary.eps,
        rotary.offset,
        heads,
        kv_heads,
        queries,
        dim,
        half,
        group,
        width,
        triton.next_power_of_2(rest) if rest else 0,
        *pairs,
        norms is not None,
        overlap := capability(query.device)[0] >= 9,
        num_warps=4,
        launch_pdl=overlap,
    )
    return new_query, new_key


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    query,
    key,
    new_query,
    new_key,
    cosines,
    sines,
    query_norm,
    key_norm,
    query_token,
    query_head,
    key_token,
    key_head,
    angles_token,
    eps,
    offset,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    query_blocks: tl.constexpr,
    dim: tl.constexpr,
    half: tl.constexpr,
    group: tl.constexpr,
    width: tl.constexpr,
    rest: tl.constexpr,
    step: tl.constexpr,
    apart: tl.constexpr,
    angle_step: tl.constexpr,
    angles_apart: tl.constexpr,
    has_norms: tl.constexpr,
    overlap: tl.constexpr,
):
    if overlap:  # programmatic dependent launch
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if block < query_blocks:
        _rotate_heads(
            query + token * query_token, query_head, new_query + token * (heads * dim), query_norm,
            cosines + token * angles_token, sines + token * angles_token, block * group, eps, offset,
            heads, dim, half, group, width, rest, step, apart, angle_step, angles_apart, has_norms,
        )  # fmt: skip
    else:
        _rotate_heads(
            key + token * key_token, key_head, new_key + token * (kv_heads * dim), key_norm,
            cosines + token * angles_token, sines + token * angles_token, (block - query_blocks) * group, eps, offset,
            kv_heads, dim, half, group, width, rest, step, apart, angle_step, angles_apart, has_norms,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_heads(  # type: ignore[no-untyped-def]
    source,
    pitch,
    target,
    weight,
    cosines,
    sines,
    first_head,
    eps,
    offset,
    heads: tl.constexpr,
    dim: tl.constexpr,
    half: tl.constexpr,
    group: tl.constexpr,
    width: tl.constexpr,
    rest: tl.constexpr,
    step: tl.constexpr,
    apart: tl.constexpr,
    angle_step: tl.constexpr,
    angles_apart: tl.constexpr,
    has_norms: tl.constexpr,
):
    head = first_head + tl.arange(0, group)[:, None]
    column = tl.arange(0, width)[None, :]
    inside = (head < heads) & (column < half)
    first = column * step
    second = first + apart
    x = tl.load(source + head * pitch + first, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(source + head * pitch + second, mask=inside, other=0.0).to(tl.float32)
    if rest > 0:
        beyond = 2 * half + tl.arange(0, rest)[None, :]
        left = (head < heads) & (beyond < dim)
        z = tl.load(source + head * pitch + beyond, mask=left, other=0.0).to(tl.float32)
    if has_norms:
        squares = tl.sum(x * x + y * y, 1)
        if rest > 0:
            squares += tl.sum(z * z, 1)
        scale = tl.rsqrt(squares / dim + eps)[:, None]
        row = column < half
        x *= scale * (tl.load(weight + first, mask=row, other=0.0).to(tl.float32) + offset)
        y *= scale * (tl.load(weight + second, mask=row, other=0.0).to(tl.float32) + offset)
        if rest > 0:
            z *= scale * (tl.load(weight + beyond, mask=beyond < dim, other=0.0).to(tl.float32) + offset)
    angle = column < half
    cosines += column * angle_step
    sines += column * angle_step
    cos = tl.load(cosines, mask=angle, other=0.0).to(tl.float32)
    sin = tl.load(sines, mask=angle, other=0.0).to(tl.float32)
    cos_of_second = tl.load(cosines + angles_apart, mask=angle, other=0.0).to(tl.float32)
    sin_of_second = tl.load(sines + angles_apart, mask=angle, other=0.0).to(tl.float32)
    tl.store(target + head * dim + first, x * cos - y * sin, mask=inside)
    tl.store(target + head * dim + second, y * cos_of_second + x * sin_of_second, mask=inside)
    if rest > 0:
        tl.store(target + head * dim + beyond, z, mask=left)
