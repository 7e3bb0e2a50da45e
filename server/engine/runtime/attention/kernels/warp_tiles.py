"""Tiles of a KV cache in 8 bits whose keys are divided among a thread block's warps.

Each warp has a softmax over its own keys, which takes no barrier. The warps' sums are added up once, behind the last key.

Two neighbouring elements of a head are loaded as one int16, and its conversion gives two tensors in float16, of the even
and of the odd elements. So ldmatrix, whose elements have 16 bits, loads the operands of matrix instructions from shared
memory, and each of their registers is converted where it is. The conversions are exact. Queries are multiplied by a power
of 2 that brings them into float16's range.

A probability times its value's scale may be outside of that range. So the scale goes into the exponent: numerators are
exp2(score + log2(scale) - the greatest such sum), at most 1, and divided by the scale in float32 for the sum of weights.
"""

from __future__ import annotations

import os

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from server.engine.runtime.attention.kernels.key_tiles import scores_of

# Triton's interpreter knows no assembly.
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# Of the four values of a register, 0 and 2 go to the first result, 1 and 3 to the second. A byte b behind 0x64 is the
# float16 1024 + b, and b is a value plus 128.
_FROM_INT8 = tl.constexpr("""{
.reg .b32 x, even, odd, offset;
xor.b32 x, $2, 0x80808080;
mov.b32 offset, 0x64806480;
prmt.b32 even, x, 0x64646464, 0x4240;
prmt.b32 odd, x, 0x64646464, 0x4341;
sub.f16x2 $0, even, offset;
sub.f16x2 $1, odd, offset;
}""")
_FROM_E4M3 = tl.constexpr("""{
.reg .b32 x;
.reg .b16 even, odd;
prmt.b32 x, $2, 0, 0x3120;
mov.b32 {even, odd}, x;
cvt.rn.f16x2.e4m3x2 $0, even;
cvt.rn.f16x2.e4m3x2 $1, odd;
}""")


@triton.jit  # type: ignore[untyped-decorator]
def load_warp_tiles(pages, scales, table, begin, end, instance: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a tile of keys from begin on, zeros from end on, as keys [warps, keys, dim / 2] of int16.

    Returns the keys, the values [warps, dim / 2, keys], their scales, and which of them are in front of end, all three
    [warps, keys]. pages, scales: the cache's data and scales, at the head. instance: a DecodeInstance.
    """
    shape: tl.constexpr = instance.cache
    size: tl.constexpr = shape.block_size
    keys: tl.constexpr = instance.tile // instance.warps
    at = begin + (tl.arange(0, instance.warps)[:, None] * keys + tl.arange(0, keys)[None, :])
    # Behind the end lie keys that no query sees. The last key is loaded again there, which takes no masks. Division and
    # remainder of an unsigned number are one instruction each.
    place = tl.minimum(at, tl.maximum(end - 1, 0)).to(tl.uint32)
    block = tl.load(table + place // size).to(tl.int64)
    place = (place % size).to(tl.int32)
    words = pages.to(tl.pointer_type(tl.int16)) + block * shape.half + place * (shape.token_pitch // 2)
    data = words[:, :, None] + tl.arange(0, shape.dim // 2)[None, None, :]
    k = tl.load(data)
    # Transposed pointers, because a loaded tensor that is transposed would be converted before it is in shared memory.
    v = tl.load(tl.permute(data + shape.half // 2, [0, 2, 1]))
    own = scales + block * (2 * size * shape.kv_heads) + place
    k_scale = tl.load(own)
    v_scale = tl.load(own + size * shape.kv_heads)
    return k, v, k_scale, v_scale, at < end


@triton.jit  # type: ignore[untyped-decorator]
def half_queries(q, scale, instance: tl.constexpr):  # type: ignore[no-untyped-def]
    """Queries [rows, dim] of 16 bits as two float16 [warps, dim / 2, rows], and the scale that their scores have then."""
    rows: tl.constexpr = instance.rows
    half: tl.constexpr = instance.cache.dim // 2
    if q.dtype != tl.float16:
        largest = tl.maximum(tl.max(tl.max(tl.abs(q.to(tl.float32)), 1), 0), 1e-30)
        # The greatest power of 2 that is not above it. So the largest element comes between 2^14 and 2^15.
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = scale * (power / 16384)
        q = (q.to(tl.float32) * (16384 / power)).to(tl.float16)
    even, odd = tl.split(tl.reshape(q, [rows, half, 2]))
    even = tl.broadcast_to(tl.trans(even)[None, :, :], [instance.warps, half, rows])
    odd = tl.broadcast_to(tl.trans(odd)[None, :, :], [instance.warps, half, rows])
    return even, odd, scale


@triton.jit  # type: ignore[untyped-decorator]
def no_sums(instance: tl.constexpr):  # type: ignore[no-untyped-def]
    """The warps' sums without a key: those of even and odd elements, the greatest scores, weights by key of a tile."""
    rows: tl.constexpr = instance.rows
    warps: tl.constexpr = instance.warps
    half: tl.constexpr = instance.cache.dim // 2
    keys: tl.constexpr = instance.tile // warps
    sums = tl.zeros([warps, half, rows], tl.float32)
    # Weights stay apart until the end, because a sum over keys is one over threads.
    return sums, sums, tl.full([warps, rows], -1e38, tl.float32), tl.zeros([warps, keys, rows], tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def add_warp_tiles(  # type: ignore[no-untyped-def]
    of_warps, q_even, q_odd, k, v, k_scale, v_scale, inside, scale, instance: tl.constexpr
):
    """Add what load_warp_tiles() has loaded to the sums of no_sums(); q_even, q_odd and scale are from half_queries()."""
    limit: tl.constexpr = instance.cache.limit
    even, odd, best, weights = of_warps
    k_even, k_odd = _values(k, limit)
    dots = tl.dot(k_odd, q_odd, tl.dot(k_even, q_even))
    # Smaller scales are those of zeros, and of places that nothing has written.
    v_scale = tl.maximum(v_scale, 1e-30)
    scores = scores_of(dots, (k_scale * scale)[:, :, None], instance.cap) + _log2(v_scale)[:, :, None]
    scores = tl.where(inside[:, :, None], scores, -float("inf"))
    higher = tl.maximum(tl.maximum(best, tl.max(scores, 1)), -1e38)
    shrink = tl.exp2(best - higher)[:, None, :]
    p = tl.exp2(scores - higher[:, None, :])
    v_even, v_odd = _values(v, limit)
    narrow = p.to(tl.float16)
    even = tl.dot(v_even, narrow, even * shrink)
    odd = tl.dot(v_odd, narrow, odd * shrink)
    return even, odd, higher, weights * shrink + p * _inverse(v_scale)[:, :, None]


@triton.jit  # type: ignore[untyped-decorator]
def total(of_warps, instance: tl.constexpr):  # type: ignore[no-untyped-def]
    """All warps' sums together: sums [rows, dim], greatest scores and sums of weights [rows]."""
    even, odd, best, weights = of_warps
    highest = tl.max(best, 0)
    part = tl.exp2(best - highest[None, :])
    even = tl.sum(even * part[:, None, :], 0)
    odd = tl.sum(odd * part[:, None, :], 0)
    acc = tl.reshape(tl.permute(tl.join(even, odd), [1, 0, 2]), [instance.rows, instance.cache.dim])
    return acc, highest, tl.sum(tl.sum(weights, 1) * part, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _values(pairs, limit: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values of the low bytes of int16 and those of the high ones, in float16; limit: a CacheShape's."""
    if _INTERPRETED:
        if limit == 127:
            return ((pairs << 8) >> 8).to(tl.float16), (pairs >> 8).to(tl.float16)
        low, high = (pairs & 255).to(tl.uint8), ((pairs >> 8) & 255).to(tl.uint8)
        return (
            low.to(tl.float8e4nv, bitcast=True).to(tl.float16),
            high.to(tl.float8e4nv, bitcast=True).to(tl.float16),
        )
    elif limit == 127:
        return tl.inline_asm_elementwise(
            _FROM_INT8, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            _FROM_E4M3, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def _log2(x):  # type: ignore[no-untyped-def]
    """log2 of normal numbers in one instruction, off by 2^-22; tl.log2() takes twenty."""
    if _INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _inverse(x):  # type: ignore[no-untyped-def]
    """1 / x of normal numbers in one instruction, off by a unit in the last place."""
    if _INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
