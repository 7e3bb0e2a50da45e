"""Mamba2 in plain torch: what the kernels are tested against, on every device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nf4_kernels.gated_delta_params import Sequences
from nf4_kernels.mamba2_params import Mamba2


def run(p: Mamba2, sequences: Sequences) -> Tensor:
    """The results [T, H P]; rows of no sequence and of padding are zeros."""
    starts, has_state = sequences.query_start_loc, sequences.has_state
    result = p.z.new_zeros(p.z.shape)
    if starts is None or has_state is None:
        rows = (sequences.slots >= 0).nonzero().squeeze(1)
        at = sequences.slots[rows].long()
        window = torch.cat([p.conv_state[at], p.xbc[rows].unsqueeze(-1)], dim=-1)
        p.conv_state[at] = window[..., 1:]
        state, y = _advance(p, p.state[at], _convolved(p, window), p.dt[rows])
        p.state[at] = state
        result[rows] = gated(p, y, p.z[rows])
        return result
    bounds, slots = starts.tolist(), sequences.slots.tolist()
    for begin, end, slot, continues in zip(bounds, bounds[1:], slots, has_state.tolist(), strict=False):
        if slot >= 0 and end > begin:
            result[begin:end] = _chunk(p, slice(begin, end), slot, continues)
    return result


def _chunk(p: Mamba2, rows: slice, slot: int, continues: bool) -> Tensor:
    """The rows of one sequence, token by token."""
    taps = p.conv_weight.shape[1]
    history, state = p.conv_state[slot], p.state[slot].unsqueeze(0)
    if not continues:
        history, state = torch.zeros_like(history), torch.zeros_like(state)
    inputs = torch.cat([history, p.xbc[rows].t()], dim=-1)
    mixed = _convolved(p, inputs.unfold(-1, taps, 1).transpose(0, 1))
    outs = []
    for one, dt in zip(mixed.split(1), p.dt[rows].split(1), strict=True):
        state, y = _advance(p, state, one, dt)
        outs.append(y)
    p.conv_state[slot] = inputs[:, inputs.shape[1] - taps + 1 :]
    p.state[slot] = state[0]
    return gated(p, torch.cat(outs), p.z[rows])


def _convolved(p: Mamba2, windows: Tensor) -> Tensor:
    """SiLU of the convolution of windows [.., C, K], rounded to their dtype, as float32 [.., C]."""
    mixed = (windows.float() * p.conv_weight).sum(-1)
    if p.conv_bias is not None:
        mixed = mixed + p.conv_bias
    return functional.silu(mixed).to(windows.dtype).float()


def _advance(p: Mamba2, state: Tensor, mixed: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
    """The states [S, H, N, P] after one token of each of S sequences, and the tokens' outputs [S, H, P]."""
    keys = p.groups * p.state_dim
    x, b, c = mixed.split([p.width, keys, keys], dim=-1)
    x = x.unflatten(-1, (p.heads, p.head_dim))
    b, c = (
        part.unflatten(-1, (p.groups, p.state_dim)).repeat_interleave(p.heads // p.groups, dim=-2) for part in (b, c)
    )
    rate = functional.softplus(dt.float() + p.dt_bias).clamp(*p.dt_limit)
    decay = torch.exp(-torch.exp(p.a_log) * rate)
    state = state * decay[..., None, None] + b.unsqueeze(-1) * (rate.unsqueeze(-1) * x).unsqueeze(-2)
    return state, (state * c.unsqueeze(-1)).sum(-2) + p.d[:, None] * x


def gated(p: Mamba2, y: Tensor, z: Tensor) -> Tensor:
    """The gated norm [T, H P] of y [T, H, P] in z's dtype."""
    gate, y = functional.silu(z.float()), y.float().flatten(-2)
    if p.norm_weight is None:
        return (y * gate).to(z.dtype)
    y = y if p.norm_before_gate else y * gate
    parts = y.unflatten(-1, (p.norm_groups, -1))
    y = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + p.eps)).flatten(-2) * p.norm_weight
    return (y * gate if p.norm_before_gate else y).to(z.dtype)
