"""Random layers of the gated delta rule, and the recurrence in float64, token by token and head by head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nf4_kernels import gated_delta
from nf4_kernels.gated_delta_params import GatedDelta, Sequences

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
"""Largest distance of a result, relative to the norm."""


@dataclass(frozen=True)
class Layer:
    """A layer's parameters, its pools of states, and random inputs for it."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    dtype: torch.dtype
    conv_weight: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    conv_state: Tensor
    state: Tensor
    eps: float = 1e-6

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def inputs(self, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """qkv, z, a and b as views of one joined tensor, as a joined GEMM gives them."""
        widths = [self.channels, self.value_heads * self.value_dim, self.value_heads, self.value_heads]
        generator = torch.Generator().manual_seed(seed)
        joined = torch.randn(tokens, sum(widths) + 8, generator=generator).to(self.dtype).to(self.state.device)
        qkv, z, a, b, _ = joined.split([*widths, 8], dim=-1)
        return qkv, z, a, b

    def step(self, inputs: tuple[Tensor, ...], slots: Tensor) -> Tensor:
        return gated_delta.run(self.tensors(inputs), Sequences(slots))

    def chunks(self, inputs: tuple[Tensor, ...], starts: Tensor, slots: Tensor, has_state: Tensor) -> Tensor:
        return gated_delta.run(self.tensors(inputs), Sequences(slots, starts, has_state))

    def tensors(self, inputs: tuple[Tensor, ...]) -> GatedDelta:
        qkv, z, a, b = inputs
        parameters = self.conv_weight, self.a_log, self.dt_bias, self.norm_weight, self.eps
        return GatedDelta(qkv, z, a, b, *parameters, self.conv_state, self.state, self.key_heads)


def random_layer(
    heads: tuple[int, int, int, int],
    slots: int,
    dtype: torch.dtype = torch.float32,
    taps: int = 4,
    device: str = "cpu",
    state_dtype: torch.dtype = torch.float32,
) -> Layer:
    """heads: key heads, value heads, dk, dv. States begin as random numbers: a sequence without one must not read them."""
    key_heads, value_heads, key_dim, value_dim = heads
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    generator = torch.Generator().manual_seed(sum(heads) + slots)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return Layer(
        *heads,
        taps,
        dtype,
        (normal(channels, taps) / taps**0.5).to(dtype).to(device),
        torch.rand(value_heads, generator=generator).mul(8).add(0.01).log().to(device),
        normal(value_heads).sub(2).to(device),
        normal(value_dim).mul(0.2).add(1).to(dtype).to(device),
        normal(slots, channels, taps - 1).to(dtype).to(device),
        normal(slots, value_heads, key_dim, value_dim).mul(0.3).to(state_dtype).to(device),
    )


@dataclass
class Sequence:
    """A sequence's states in float64, advanced token by token."""

    layer: Layer
    conv_state: Tensor
    state: Tensor

    @staticmethod
    def at(layer: Layer, slot: int) -> Sequence:
        """The sequence of a slot, as the slot is now."""
        return Sequence(layer, layer.conv_state[slot].double().cpu(), layer.state[slot].double().cpu())

    @staticmethod
    def new(layer: Layer) -> Sequence:
        empty = Sequence.at(layer, 0)
        return Sequence(layer, torch.zeros_like(empty.conv_state), torch.zeros_like(empty.state))

    def advance(self, qkv: Tensor, z: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The results [n, Hv dv] in float64 of n tokens."""
        rows = zip(*(x.double().cpu() for x in (qkv, z, a, b)), strict=True)
        outs = [self._advance(*row) for row in rows]
        return torch.stack(outs) if outs else torch.zeros(0, z.shape[1], dtype=torch.float64)

    def _advance(self, qkv: Tensor, z: Tensor, a: Tensor, b: Tensor) -> Tensor:
        p = self.layer
        window = torch.cat([self.conv_state, qkv[:, None]], dim=1)
        self.conv_state = window[:, 1:]
        mixed = functional.silu((window * p.conv_weight.double().cpu()).sum(1))
        keys, out = p.key_heads * p.key_dim, []
        for head in range(p.value_heads):
            at = head // (p.value_heads // p.key_heads) * p.key_dim
            q, k = mixed[at : at + p.key_dim], mixed[keys + at : keys + at + p.key_dim]
            v = mixed[2 * keys + head * p.value_dim :][: p.value_dim]
            q, k = q / (q.dot(q) + 1e-6).sqrt() / p.key_dim**0.5, k / (k.dot(k) + 1e-6).sqrt()
            rate = functional.softplus(a[head] + p.dt_bias[head].double().cpu())
            s = self.state[head] * torch.exp(-p.a_log[head].double().cpu().exp() * rate)
            s = s + torch.outer(k, torch.sigmoid(b[head]) * (v - k @ s))
            self.state[head] = s
            o = q @ s
            o = o / (o.square().mean() + p.eps).sqrt() * p.norm_weight.double().cpu()
            out.append(o * functional.silu(z[head * p.value_dim :][: p.value_dim]))
        return torch.cat(out)


def is_close(found: Tensor, exact: Tensor, bound: float) -> bool:
    """Whether found is off by at most bound of exact's norm."""
    assert found.shape == exact.shape
    found = found.double().cpu()
    assert found.isfinite().all()
    return bool((found - exact).norm() <= bound * exact.norm() + 1e-12)


def indices(*values: int, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def flags(*values: bool, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.bool, device=device)
