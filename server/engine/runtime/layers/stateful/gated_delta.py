"""The gated delta rule as the mixer of a decoder layer: projections, causal convolution, recurrent state, gated norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

import nf4_kernels.gated_delta
from nf4_kernels.gated_delta_params import GatedDelta as Tensors
from nf4_kernels.gated_delta_params import Sequences
from server.engine.runtime.layers.norm import Norm
from server.engine.runtime.layers.projection import ModuleProjection, Projection, projection_of
from server.engine.runtime.layers.stateful import delta_chunks
from server.engine.runtime.layers.stateful.pieces import pieces_of
from server.engine.runtime.layers.stateful.state_layers import StateMixer, in_parts
from server.engine.runtime.model.projections import GroupMember
from server.engine.runtime.states.kinds import StateKind, gated_delta
from server.engine.runtime.states.pool import StatePool, StateStep

INPUTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""transformers' names of the projections of a layer's input, as Qwen3.5 has them."""
_FUSED = {"in_proj_qkvz": INPUTS[:2], "in_proj_ba": INPUTS[2:]}
"""Those of Qwen3-Next, whose columns are in the order of the key heads, and what they compute."""


@dataclass(frozen=True)
class InputProjection:
    """One GEMM of a layer's input, whose columns are the results of one or several of INPUTS."""

    module: nn.Module
    projection: Projection
    names: Sequence[str]
    sizes: Sequence[int]
    order: torch.Tensor | None = None
    """int64, the GEMM's columns in the order of the results; None: they are in order."""

    @classmethod
    def of(
        cls, module: nn.Module, names: Sequence[str], sizes: Sequence[int], order: torch.Tensor | None = None
    ) -> InputProjection:
        """The projection that a module in its final form computes."""
        return cls(module, projection_of(module), names, sizes, order)

    def results(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Results [T, size] for x [T, k], by their names."""
        columns = self.projection(x)
        if self.order is not None:
            columns = columns.index_select(-1, self.order)
        return dict(zip(self.names, columns.split(self.sizes, -1), strict=True))


@dataclass(frozen=True)
class DeltaRule:
    """The parameters of a layer that are no projections, and its sizes."""

    conv_weight: torch.Tensor
    """[C, K]."""
    a_log: torch.Tensor
    """float32 [value heads], as dt_bias."""
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    """[value_dim]."""
    eps: float
    key_heads: int
    key_dim: int

    @property
    def kind(self) -> StateKind:
        (channels, taps), value_dim = self.conv_weight.shape, self.norm_weight.shape[0]
        heads = self.a_log.shape[0]
        return gated_delta(channels, taps, heads, self.key_dim, value_dim, self.conv_weight.dtype)

    def mixer(self, module: nn.Module, pool: StatePool, index: int) -> GatedDelta:
        output: nn.Module = module.out_proj  # type: ignore[assignment]
        inputs = _read_fused(module, self) if hasattr(module, "in_proj_qkvz") else _read_inputs(module)
        return GatedDelta(inputs, projection_of(output), output, self, pool, *pool.of_layer(index))


@dataclass(frozen=True)
class GatedDelta(StateMixer):
    """A layer's mixer over states in a pool; nf4_kernels.gated_delta says what it computes."""

    inputs: Sequence[InputProjection]
    output: Projection
    output_module: nn.Module
    rule: DeltaRule
    pool: StatePool
    conv_state: torch.Tensor
    """[slots, C, K - 1] of the pool."""
    state: torch.Tensor
    """float32 [slots, value heads, key_dim, value_dim] of the pool."""

    def __call__(
        self, x: torch.Tensor, norm: Norm | None, angles: object, residual: torch.Tensor | None
    ) -> torch.Tensor:
        x = x if norm is None else norm(x)
        found: dict[str, torch.Tensor] = {}
        for part in self.inputs:
            found |= part.results(x)
        qkv, z, b, a = (found[name] for name in INPUTS)
        return self.output(self._advanced(qkv, z, a, b), residual=residual)

    def by_modules(self) -> GatedDelta:
        inputs = [replace(part, projection=ModuleProjection(part.module)) for part in self.inputs]
        return replace(self, inputs=inputs, output=ModuleProjection(self.output_module))

    def _advanced(self, *rows: torch.Tensor) -> torch.Tensor:
        """[T, value heads * value_dim] of qkv, z, a and b [T, columns]; the states go on by T tokens."""
        step = self.pool.step
        return in_parts(
            step,
            rows,
            lambda own: nf4_kernels.gated_delta.run(self._tensors(own), Sequences(step.singles)),
            lambda own: self._chunks(self._tensors(own), step),
        )

    def _chunks(self, p: Tensors, step: StateStep) -> torch.Tensor:
        if delta_chunks.takes(p, step.longest):
            pieces = pieces_of(step, self.rule.kind, p.qkv.shape[0], delta_chunks.max_tokens(p))
            return delta_chunks.chunks(p, pieces)
        return nf4_kernels.gated_delta.run(p, Sequences(step.chunks, step.query_start_loc, step.has_state))

    def _tensors(self, rows: list[torch.Tensor]) -> Tensors:
        """The tensors of the layer for these rows of qkv, z, a and b."""
        rule = self.rule
        parameters = rule.conv_weight, rule.a_log, rule.dt_bias, rule.norm_weight, rule.eps
        qkv, z, a, b = rows
        return Tensors(qkv, z, a, b, *parameters, self.conv_state, self.state, rule.key_heads)


def read_rule(module: nn.Module) -> DeltaRule | None:
    """The rule of transformers' module of a layer's mixer; None if it has other parts than Qwen3.5's or Qwen3-Next's."""
    parts = dict(module.named_children())
    parts.pop("act", None)
    if set(parts) - {"conv1d", "norm", "out_proj"} not in (set(INPUTS), set(_FUSED)) or "conv1d" not in parts:
        return None
    norm, convolution = parts["norm"], parts["conv1d"]
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    heads, dim = getattr(module, "num_k_heads", None), getattr(module, "head_k_dim", None)
    if not isinstance(heads, int) or not isinstance(dim, int) or not isinstance(eps, float):
        return None
    if (
        not isinstance(convolution, nn.Conv1d)
        or convolution.bias is not None
        or getattr(module, "activation", None) != "silu"
    ):
        return None
    a_log, dt_bias, weight = (own.detach() for own in (module.A_log, module.dt_bias, norm.weight))  # type: ignore[operator]
    taps = convolution.weight.detach().squeeze(1).contiguous()
    return DeltaRule(taps, a_log.float(), dt_bias.float(), weight.contiguous(), eps, heads, dim)


def _read_inputs(module: nn.Module) -> list[InputProjection]:
    """The GEMMs of a module's inputs."""
    inputs: list[InputProjection] = []
    plain: list[str] = []
    for name in INPUTS:
        own = getattr(module, name)
        if isinstance(own, GroupMember):
            if own.linear is not None:
                members = [member for member in INPUTS if _shares(getattr(module, member), own)]
                inputs.append(InputProjection.of(own.linear, members, own.sizes))
        elif type(own) is nn.Linear:
            plain.append(name)
        else:
            inputs.append(InputProjection.of(own, [name], [own.out_features]))
    if plain:
        linears = [getattr(module, name) for name in plain]
        inputs.append(InputProjection.of(_joined(linears), plain, [linear.out_features for linear in linears]))
    return inputs


def _read_fused(module: nn.Module, rule: DeltaRule) -> list[InputProjection]:
    """The GEMMs of a module's inputs whose columns have the results of one key head after another."""
    heads, dim = rule.key_heads, rule.key_dim
    values = rule.a_log.shape[0] // heads
    width = values * rule.norm_weight.shape[0]
    inputs = []
    for name, parts in (("in_proj_qkvz", ((dim, dim, width), (width,))), ("in_proj_ba", ((values,), (values,)))):
        own = getattr(module, name)
        columns = torch.arange(own.out_features, device=rule.a_log.device).view(heads, -1)
        order = torch.cat([part.flatten() for part in columns.split([size for sizes in parts for size in sizes], -1)])
        inputs.append(InputProjection.of(own, _FUSED[name], [heads * sum(sizes) for sizes in parts], order))
    return inputs


def _shares(module: nn.Module, first: GroupMember) -> bool:
    return isinstance(module, GroupMember) and module.sizes is first.sizes


def _joined(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One linear layer of several, whose weights become parts of its own and take no memory of theirs."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    with torch.device("meta"):
        joined = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    joined.weight = nn.Parameter(weight, requires_grad=False)
    for linear, part in zip(linears, weight.split([linear.out_features for linear in linears]), strict=True):
        linear.weight.data = part
    return joined
