"""Mamba2 (SSD) as the mixer of a decoder layer: one projection, causal convolution, recurrent state, gated norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nf4_kernels import mamba2
from nf4_kernels.gated_delta_params import Sequences
from nf4_kernels.mamba2_params import Mamba2
from server.engine.runtime.layers.norm import Norm
from server.engine.runtime.layers.projection import projection_of
from server.engine.runtime.layers.stateful import mamba2_cuda
from server.engine.runtime.layers.stateful.pieces import Singles, pieces_of
from server.engine.runtime.layers.stateful.state_layers import JoinedMixer, in_parts
from server.engine.runtime.states import kinds
from server.engine.runtime.states.kinds import StateKind
from server.engine.runtime.states.pool import StatePool, StateStep

_PARTS = {"conv1d", "in_proj", "out_proj"}


@dataclass(frozen=True)
class Mamba2Rule:
    """The parameters of a layer that are no projections, and its sizes; nf4_kernels.mamba2 says what they are."""

    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    a_log: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor | None
    eps: float
    dt_limit: tuple[float, float]
    groups: int
    norm_groups: int
    norm_before_gate: bool
    state_dim: int
    head_dim: int
    dtype: torch.dtype
    """Of activations."""
    input_multiplier: float = 1.0
    column_multipliers: torch.Tensor | None = None
    """[columns of the input's projection] (Falcon-H1)."""

    @property
    def kind(self) -> StateKind:
        channels, taps = self.conv_weight.shape
        return kinds.mamba2(channels, taps, self.a_log.shape[0], self.state_dim, self.head_dim, self.dtype)

    def mixer(self, module: nn.Module, pool: StatePool, index: int) -> Mamba2Mixer:
        parts = dict(module.named_children())
        modules = parts["in_proj"], parts["out_proj"]
        first, last = map(projection_of, modules)
        singles = Singles.of(pool.max_num_seqs, pool.device)
        return Mamba2Mixer(first, last, modules, pool, self, singles, *pool.of_layer(index))


@dataclass(frozen=True)
class Mamba2Mixer(JoinedMixer):
    """A layer's mixer over states in a pool. The input's columns: the gate, what is convolved, the heads' rates."""

    rule: Mamba2Rule
    singles: Singles
    conv_state: torch.Tensor
    """[slots, C, K - 1] of the pool."""
    state: torch.Tensor
    """float32 [slots, heads, state_dim, head_dim] of the pool."""

    def __call__(
        self, x: torch.Tensor, norm: Norm | None, angles: object, residual: torch.Tensor | None
    ) -> torch.Tensor:
        rule = self.rule
        if rule.input_multiplier != 1.0:
            x, norm = (x if norm is None else norm(x)) * rule.input_multiplier, None
        columns = self.input(x, norm)
        if rule.column_multipliers is not None:
            columns = columns * rule.column_multipliers
        return self.output(self._advanced(columns), residual=residual)

    def _advanced(self, columns: torch.Tensor) -> torch.Tensor:
        """[T, heads * head_dim] of the projection's columns [T, n]; the states go on by T tokens."""
        step = self.pool.step
        return in_parts(
            step,
            [columns],
            lambda rows: self._singles(self._tensors(rows[0]), step),
            lambda rows: self._chunks(self._tensors(rows[0]), step),
        )

    def _singles(self, p: Mamba2, step: StateStep) -> torch.Tensor:
        if not p.xbc.is_cuda:
            return mamba2.run(p, Sequences(step.singles))
        return mamba2_cuda.step(p, self.singles.piece(step.singles))

    def _chunks(self, p: Mamba2, step: StateStep) -> torch.Tensor:
        if not p.xbc.is_cuda:
            return mamba2.run(p, Sequences(step.chunks, step.query_start_loc, step.has_state))
        pieces = pieces_of(step, self.rule.kind, p.xbc.shape[0], mamba2_cuda.max_tokens(p))
        return mamba2_cuda.chunks(p, pieces, step.longest)

    def _tensors(self, columns: torch.Tensor) -> Mamba2:
        rule = self.rule
        heads = rule.a_log.shape[0]
        z, xbc, dt = columns.split([heads * rule.head_dim, rule.conv_weight.shape[0], heads], -1)
        parameters = rule.conv_weight, rule.conv_bias, rule.a_log, rule.d, rule.dt_bias, rule.norm_weight
        sizes = rule.groups, rule.norm_groups, rule.norm_before_gate
        return Mamba2(z, xbc, dt, *parameters, rule.eps, rule.dt_limit, *sizes, self.conv_state, self.state)


def read_mamba2(module: nn.Module) -> Mamba2Rule | None:
    """The rule of transformers' module of a layer's mixer; None if it has other parts than a Mamba2 layer."""
    parts = dict(module.named_children())
    convolution, norm = parts.get("conv1d"), parts.get("norm")
    sizes = [getattr(module, name, None) for name in ("num_heads", "head_dim", "n_groups", "ssm_state_size")]
    limit = getattr(module, "time_step_limit", None)
    if set(parts) - {"act", "norm"} != _PARTS or not isinstance(convolution, nn.Conv1d):
        return None
    if not all(isinstance(size, int) for size in sizes) or limit is None or getattr(module, "activation", "") != "silu":
        return None
    return _rule(
        module, convolution, None if isinstance(norm, nn.Identity) else norm, (float(limit[0]), float(limit[1]))
    )


def _rule(module: Any, convolution: nn.Conv1d, norm: Any, limit: tuple[float, float]) -> Mamba2Rule:
    width, dtype = module.num_heads * module.head_dim, convolution.weight.dtype
    multipliers: torch.Tensor | None = getattr(module, "mup_vector", None)
    return Mamba2Rule(
        _wide(convolution.weight.squeeze(1)),
        None if convolution.bias is None else _wide(convolution.bias),
        _wide(module.A_log),
        _wide(module.D),
        _wide(module.dt_bias),
        None if norm is None else _wide(norm.weight),
        eps=0.0 if norm is None else float(norm.variance_epsilon),
        dt_limit=limit,
        groups=module.n_groups,
        norm_groups=_norm_groups(norm, width),
        norm_before_gate=bool(getattr(norm, "norm_before_gate", False)),
        state_dim=module.ssm_state_size,
        head_dim=module.head_dim,
        dtype=dtype,
        input_multiplier=float(getattr(module, "ssm_in_multiplier", 1.0)),
        column_multipliers=None if multipliers is None else multipliers.flatten().to(dtype),
    )


def _norm_groups(norm: Any, width: int) -> int:
    """The parts that a gated norm divides; without a word of them it is of the whole width, as in transformers 5.17."""
    size = getattr(norm, "group_size", None)
    return int(getattr(norm, "n_groups", 1)) if size is None else width // int(size)


def _wide(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().float().contiguous()
