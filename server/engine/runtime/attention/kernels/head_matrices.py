"""GEMMs of few tokens by a matrix of each head, before and after attention over latents."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from nf4_kernels.cuda.device import capability

_ROWS, _ELEMENTS = 16, 16384
"""Tokens of a thread block, and elements of a head's matrix that it holds at a time."""


def multiply_heads(x: torch.Tensor, matrices: torch.Tensor, rest: int = 0) -> torch.Tensor:
    """Each head's x [T, heads, k + rest] times its matrix [k, n], with the rest of its columns after: [T, heads, n + rest].

    x of 16 bits with a contiguous last dimension, matrices [heads, k, n] of its dtype, parameters, any strides; n is a
    multiple of 16.
    """
    tokens, heads, _ = x.shape
    _, k, n = matrices.shape
    out = x.new_empty(tokens, heads, n + rest)
    width = triton.next_power_of_2(k)
    columns = min(64, max(16, _ELEMENTS // width))
    overlap = capability(x.device)[0] >= 9
    _multiply[(triton.cdiv(n, columns), heads, triton.cdiv(tokens, _ROWS))](
        x,
        matrices,
        out,
        tokens,
        *x.stride()[:2],
        *matrices.stride(),
        k,
        n,
        rest,
        width,
        triton.next_power_of_2(rest) if rest else 0,
        columns,
        _ROWS,
        overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x,
    matrices,
    out,
    tokens,
    x_token,
    x_head,
    head_pitch,
    row_pitch,
    column_pitch,
    k: tl.constexpr,
    n: tl.constexpr,
    rest: tl.constexpr,
    width: tl.constexpr,
    rest_width: tl.constexpr,
    columns: tl.constexpr,
    rows: tl.constexpr,
    overlap: tl.constexpr,
):
    if overlap:  # docs/adr/0010-pdl-and-weight-prefetch.md
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1).to(tl.int64)
    row, column = tl.arange(0, width), tl.program_id(0) * columns + tl.arange(0, columns)
    # A parameter, which no launch writes: it may be read before the launch in front has ended.
    places = matrices + head * head_pitch + row[:, None] * row_pitch + column[None, :] * column_pitch
    b = tl.load(places, mask=(row < k)[:, None] & (column < n)[None, :], other=0.0)
    if overlap:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(2) * rows + tl.arange(0, rows)
    own = x + token[:, None].to(tl.int64) * x_token + head * x_head
    a = tl.load(own + row[None, :], mask=(token < tokens)[:, None] & (row < k)[None, :], other=0.0)
    to_out = out + (token[:, None].to(tl.int64) * tl.num_programs(1) + head) * (n + rest)
    tl.store(
        to_out + column[None, :],
        tl.dot(a, b).to(out.dtype.element_ty),
        mask=(token < tokens)[:, None] & (column < n)[None, :],
    )
    if rest != 0:
        other = tl.arange(0, rest_width)
        inside = (token < tokens)[:, None] & (other < rest)[None, :] & (tl.program_id(0) == 0)
        tl.store(to_out + n + other[None, :], tl.load(own + k + other[None, :], mask=inside), mask=inside)
