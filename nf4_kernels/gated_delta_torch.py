"""The gated delta rule with its causal convolution in plain torch: what the kernels are tested against, on every device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nf4_kernels.gated_delta_params import GatedDelta, Sequences

L2_EPS = 1e-6
"""Added to the sum of squares of q and k, as transformers and fla do."""


def run(p: GatedDelta, sequences: Sequences) -> Tensor:
    """The results [T, Hv dv]; rows of no sequence and of padding are zeros."""
    starts, has_state = sequences.query_start_loc, sequences.has_state
    if starts is None or has_state is None:
        return _step(p, sequences.slots)
    result = p.z.new_zeros(p.z.shape)
    bounds, slots = starts.tolist(), sequences.slots.tolist()
    for begin, end, slot, continues in zip(bounds, bounds[1:], slots, has_state.tolist(), strict=False):
        if slot >= 0 and end > begin:
            result[begin:end] = _chunk(p, slice(begin, end), slot, continues)
    return result


def _step(p: GatedDelta, slots: Tensor) -> Tensor:
    """One token of each of T sequences, all sequences at once."""
    rows = (slots >= 0).nonzero().squeeze(1)
    at = slots[rows].long()
    window = torch.cat([p.conv_state[at], p.qkv[rows].unsqueeze(-1)], dim=-1)
    p.conv_state[at] = window[..., 1:]
    q, k, v = _heads(p, _convolved(p, window.unsqueeze(1)))
    decay, beta = _gates(p, rows)
    state, out = _advance(p.state[at].float(), q[:, 0], k[:, 0], v[:, 0], decay, beta)
    p.state[at] = state.to(p.state.dtype)
    result = p.z.new_zeros(p.z.shape)
    result[rows] = _normalised(p, out, p.z[rows])
    return result


def _chunk(p: GatedDelta, rows: slice, slot: int, continues: bool) -> Tensor:
    """The rows of one sequence, token by token."""
    taps = p.conv_weight.shape[1]
    history, state = p.conv_state[slot], p.state[slot].float()
    if not continues:
        history, state = torch.zeros_like(history), torch.zeros_like(state)
    inputs = torch.cat([history, p.qkv[rows].t()], dim=-1)
    q, k, v = _heads(p, _convolved(p, inputs.unfold(-1, taps, 1).transpose(0, 1).unsqueeze(0)))
    decay, beta = _gates(p, rows)
    outs = []
    for token in range(q.shape[1]):
        state, out = _advance(state, q[0, token], k[0, token], v[0, token], decay[token], beta[token])
        outs.append(out)
    p.conv_state[slot] = inputs[:, inputs.shape[1] - taps + 1 :]
    p.state[slot] = state.to(p.state.dtype)
    return _normalised(p, torch.stack(outs), p.z[rows])


def _convolved(p: GatedDelta, windows: Tensor) -> Tensor:
    """SiLU of the convolution of windows [.., C, K], rounded to their dtype as the usual kernels do, as float32 [.., C]."""
    mixed = (windows.float() * p.conv_weight.float()).sum(-1)
    return functional.silu(mixed).to(windows.dtype).float()


def _heads(p: GatedDelta, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [.., Hv, dk], normalised and q scaled, and v [.., Hv, dv] of mixed [.., C]."""
    keys = p.num_key_heads * p.key_dim
    q, k, v = mixed.split([keys, keys, mixed.shape[-1] - 2 * keys], dim=-1)
    q, k = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)).repeat_interleave(p.group, dim=-2)
        for x in (part.unflatten(-1, (p.num_key_heads, p.key_dim)) for part in (q, k))
    )
    return q * p.key_dim**-0.5, k, v.unflatten(-1, (p.num_value_heads, p.value_dim))


def _gates(p: GatedDelta, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
    """The decay and beta of each token and value head, float32 [rows, Hv]."""
    decay = torch.exp(-torch.exp(p.a_log.float()) * functional.softplus(p.a[rows].float() + p.dt_bias.float()))
    return decay, torch.sigmoid(p.b[rows].float())


def _advance(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The state [.., Hv, dk, dv] after a token, and the token's output [.., Hv, dv]."""
    state = state * decay[..., None, None]
    delta = (v - (state * k.unsqueeze(-1)).sum(-2)) * beta.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)
    return state, (state * q.unsqueeze(-1)).sum(-2)


def _normalised(p: GatedDelta, out: Tensor, z: Tensor) -> Tensor:
    """weight * norm(out) * silu(z), [rows, Hv * dv], for out [rows, Hv, dv], rounded where transformers rounds."""
    dtype = z.dtype
    wide = out.to(dtype).float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + p.eps)
    gate = functional.silu(z.float()).unflatten(-1, (p.num_value_heads, p.value_dim))
    out = p.norm_weight * wide.to(dtype) * gate
    return out.to(dtype).flatten(-2)
