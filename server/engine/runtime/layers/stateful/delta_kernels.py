"""Launches around the gated delta rule in chunks of prompts: convolution and gates before it, the gated norm after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from nf4_kernels.gated_delta_params import GatedDelta
from server.engine.runtime.layers.stateful.pieces import CHUNK, Piece
from server.engine.runtime.layers.stateful.state_kernels import softplus, taps_of

_NORM_ROWS = 16


@dataclass(frozen=True)
class Convolved:
    """The inputs of the rule: q and k [T, Hk, dk], of length 1, v [T, Hv, dv]; float32 log decay and beta [T, Hv]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


def convolve(p: GatedDelta, piece: Piece) -> Convolved:
    """The inputs of the rule for a piece's rows of p, which begin with the piece. Slots keep their old inputs."""
    tokens, width = piece.end - piece.begin, max(p.key_dim, p.value_dim)
    q = p.qkv.new_empty(tokens, p.num_key_heads, p.key_dim)
    v = p.qkv.new_empty(tokens, p.num_value_heads, p.value_dim)
    log_decay = torch.empty(tokens, p.num_value_heads, dtype=torch.float32, device=q.device)
    out = Convolved(q, torch.empty_like(q), v, log_decay, torch.empty_like(log_decay))
    _convolve[(len(piece.chunks), 2 * p.num_key_heads + p.num_value_heads)](
        *(p.qkv, p.a, p.b, p.conv_weight, p.a_log, p.dt_bias, p.conv_state),
        *(piece.bounds, piece.chunks, piece.slots, piece.has_state),
        *(out.q, out.k, out.v, out.log_decay, out.beta),
        *(p.qkv.stride(0), p.a.stride(0), p.b.stride(0), p.conv_state.stride(0)),
        *(p.num_key_heads, p.num_value_heads, p.key_dim, p.value_dim, p.conv_weight.shape[1]),
        *(CHUNK, triton.next_power_of_2(width)),
        # With four, registers of a head of 128 spill.
        num_warps=8,
    )
    return out


def normalise(p: GatedDelta, o: torch.Tensor, out: torch.Tensor) -> None:
    """Write norm_weight * norm(o) * silu(z) to out [T, Hv dv], whose rows are contiguous, for o [T, Hv, dv]."""
    rows = o.shape[0] * p.num_value_heads
    _normalise[(triton.cdiv(rows, _NORM_ROWS),)](
        *(o, p.z, p.norm_weight, out, p.z.stride(0), p.eps, rows, p.num_value_heads, p.value_dim),
        *(_NORM_ROWS, triton.next_power_of_2(p.value_dim)),
        num_warps=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    qkv,
    a,
    b,
    conv_weight,
    a_log,
    dt_bias,
    conv_state,
    bounds,
    chunks,
    slots,
    has_state,
    q,
    k,
    v,
    log_decay,
    beta,
    qkv_stride,
    a_stride,
    b_stride,
    slot_stride,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    taps: tl.constexpr,
    chunk: tl.constexpr,
    width: tl.constexpr,
):
    """One chunk's tokens of one head of q, k or v; heads of v also have the gates."""
    head = tl.program_id(1)
    sequence = tl.load(chunks + 2 * tl.program_id(0))
    first = tl.load(bounds + sequence)
    tokens = tl.load(bounds + sequence + 1) - first
    # Of the sequence.
    token = tl.load(chunks + 2 * tl.program_id(0) + 1) * chunk + tl.arange(0, chunk)
    inside = token < tokens
    row = first + token
    slot = tl.load(slots + sequence).to(tl.int64)
    continues = (slot >= 0) & (tl.load(has_state + sequence) != 0)
    of_values = head >= 2 * key_heads
    dim = tl.where(of_values, value_dim, key_dim)
    begin = tl.where(of_values, 2 * key_heads * key_dim + (head - 2 * key_heads) * value_dim, head * key_dim)
    column = tl.arange(0, width)
    channel = begin + column
    in_head = column < dim
    total = taps_of(
        qkv,
        conv_weight,
        conv_state,
        first,
        token,
        inside,
        slot,
        continues,
        channel,
        in_head,
        qkv_stride,
        slot_stride,
        taps,
        0,
    )
    mixed = (total / (1.0 + tl.exp(-total))).to(q.dtype.element_ty)
    mask = inside[:, None] & in_head[None, :]
    if of_values:
        value_head = head - 2 * key_heads
        tl.store(v + (row[:, None] * value_heads + value_head) * value_dim + column[None, :], mixed, mask=mask)
        rate = tl.load(a + row * a_stride + value_head, mask=inside, other=0.0).to(tl.float32)
        rate = softplus(rate + tl.load(dt_bias + value_head))
        gate = tl.load(b + row * b_stride + value_head, mask=inside, other=0.0).to(tl.float32)
        place = row * value_heads + value_head
        tl.store(log_decay + place, -tl.exp(tl.load(a_log + value_head)) * rate, mask=inside)
        tl.store(beta + place, 1.0 / (1.0 + tl.exp(-gate)), mask=inside)
    else:
        wide = mixed.to(tl.float32)
        unit = (wide * tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)[:, None]).to(q.dtype.element_ty)
        if head < key_heads:
            tl.store(q + (row[:, None] * key_heads + head) * key_dim + column[None, :], unit, mask=mask)
        else:
            tl.store(k + (row[:, None] * key_heads + head - key_heads) * key_dim + column[None, :], unit, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _normalise(  # type: ignore[no-untyped-def]
    o,
    z,
    norm_weight,
    out,
    z_stride,
    eps,
    rows,
    heads: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
):
    """Some heads of some tokens, rounded where transformers rounds."""
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    column = tl.arange(0, width)
    mask = (row < rows)[:, None] & (column < dim)[None, :]
    wide = tl.load(o + row[:, None] * dim + column[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + column, mask=column < dim, other=0.0)
    unit = wide * tl.rsqrt(tl.sum(wide * wide, 1) / dim + eps)[:, None]
    product = weight.to(tl.float32)[None, :] * unit.to(out.dtype.element_ty).to(tl.float32)
    product = product.to(weight.dtype).to(tl.float32)
    gate = tl.load(z + (row // heads)[:, None] * z_stride + (row % heads)[:, None] * dim + column[None, :], mask=mask)
    gate = gate.to(tl.float32)
    result = product * gate / (1.0 + tl.exp(-gate))
    tl.store(out + row[:, None] * dim + column[None, :], result.to(out.dtype.element_ty), mask=mask)
