"""Random layers of Mamba2, the recurrence in float64, and what is asked of a function that computes it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nf4_kernels import mamba2
from nf4_kernels.gated_delta_params import Sequences
from nf4_kernels.mamba2_params import Mamba2
from tests.nf4_kernels.gated_delta_layers import BOUNDS, flags, indices, is_close

# (heads, head_dim, state_dim, groups)
SHAPES = [(6, 16, 24, 2), (3, 5, 20, 1), (4, 64, 128, 1), (4, 80, 16, 4)]
Shape = tuple[int, int, int, int]
Run = Callable[[Mamba2, tuple[int, ...], Sequences], Tensor]
"""A layer, the chunks' lengths and the sequences to the results."""


def random_layer(shape: Shape, slots: int, tokens: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Mamba2:
    """States begin as random numbers: a sequence without one must not read them. Rows are views of joined columns."""
    heads, head_dim, state_dim, groups = shape
    width, channels, taps = heads * head_dim, heads * head_dim + 2 * groups * state_dim, changes.pop("taps", 4)
    generator = torch.Generator().manual_seed(sum(shape) + slots)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    joined = normal(tokens, width + channels + heads + 8).to(dtype)
    z, xbc, dt, _ = joined.split([width, channels, heads, 8], -1)
    parameters = normal(channels, taps) / taps**0.5, normal(channels) / 4
    rates = torch.rand(heads, generator=generator).mul(8).add(0.01).log(), normal(heads), normal(heads) - 2
    states = normal(slots, channels, taps - 1).to(dtype), normal(slots, heads, state_dim, head_dim) * 0.3
    norm = normal(width).mul(0.2).add(1), 1e-5, (0.0, float("inf")), groups, groups, False
    return replace(Mamba2(z, xbc, dt, *parameters, *rates, *norm, *states), **changes)


def exact(p: Mamba2, rows: slice, history: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The results of a sequence's rows, and what its slot holds afterwards, in float64."""
    keys, outs = p.groups * p.state_dim, []
    for z, xbc, dt in zip(*(x[rows].double() for x in (p.z, p.xbc, p.dt)), strict=True):
        window = torch.cat([history, xbc[:, None]], dim=1)
        history = window[:, 1:]
        mixed = (window * p.conv_weight.double()).sum(1)
        mixed = functional.silu(mixed if p.conv_bias is None else mixed + p.conv_bias.double())
        x = mixed[: p.width].view(p.heads, p.head_dim)
        b, c = (mixed[p.width + at :][:keys].view(p.groups, -1) for at in (0, keys))
        rate, y = functional.softplus(dt + p.dt_bias.double()).clamp(*p.dt_limit), []
        state = state.clone()
        for head in range(p.heads):
            group = head // (p.heads // p.groups)
            decay = torch.exp(-p.a_log[head].double().exp() * rate[head])
            state[head] = decay * state[head] + torch.outer(b[group], rate[head] * x[head])
            y.append(c[group] @ state[head] + p.d[head].double() * x[head])
        gate, out = functional.silu(z), torch.cat(y)
        if p.norm_weight is None:
            outs.append(out * gate)
            continue
        parts = (out if p.norm_before_gate else out * gate).view(p.norm_groups, -1)
        out = (parts / (parts.square().mean(1, keepdim=True) + p.eps).sqrt()).flatten() * p.norm_weight.double()
        outs.append(out * gate if p.norm_before_gate else out)
    return torch.stack(outs), history, state


def _plain(p: Mamba2, lengths: tuple[int, ...], sequences: Sequences) -> Tensor:
    return mamba2.run(p, sequences)


def check(
    p: Mamba2,
    lengths: tuple[int, ...],
    slots: tuple[int, ...],
    has_state: tuple[bool, ...] | None,
    run: Run = _plain,
    bound: float | None = None,
) -> None:
    """One call for chunks of these lengths, or without has_state for one token each, with rows of padding poisoned."""
    device, bound = p.state.device.type, bound or BOUNDS[p.xbc.dtype]
    own = replace(p, **{field.name: _on_host(getattr(p, field.name)) for field in fields(p)})
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    spans = [slice(*pair) for pair in itertools.pairwise(starts)]
    for x in (p.z, p.xbc, p.dt):
        x[starts[-1] :] = float("nan")
        for span, slot in zip(spans, slots, strict=True):
            if slot < 0:
                x[span] = float("nan")
    expected = {}
    for i, (span, slot) in enumerate(zip(spans, slots, strict=True)):
        if slot >= 0 and lengths[i]:
            kept = 1.0 if has_state is None or has_state[i] else 0.0
            expected[i] = exact(own, span, own.conv_state[slot].double() * kept, own.state[slot].double() * kept)
    others = [slot for slot in range(len(p.state)) if slot not in slots]
    before = p.state[others].clone(), p.conv_state[others].clone()
    chunks = () if has_state is None else (indices(*starts, device=device), flags(*has_state, device=device))
    out = run(p, lengths, Sequences(indices(*slots, device=device), *chunks))
    assert out.isfinite().all()
    for i, (result, history, state) in expected.items():
        assert is_close(out[spans[i]], result, bound)
        assert is_close(p.state[slots[i]], state, bound)
        assert torch.equal(p.conv_state[slots[i]].double().cpu(), history)
    assert torch.equal(p.state[others], before[0])
    assert torch.equal(p.conv_state[others], before[1])


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
