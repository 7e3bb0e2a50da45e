"""The adapters on the device: which projections have room for them, and what is in each slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from bitsandbytes.nn import Linear4bit
from torch import nn

from server.checkpoint.base import CheckpointError
from server.checkpoint.lora import AdapterFactors
from server.checkpoint.sharding.shards import Part
from server.engine.runtime.model.cpu_linear import CpuNF4Linear
from server.engine.runtime.model.lora import AdaptedLinear
from server.engine.runtime.model.projections import GROUPS, GroupMember, NF4Linear


class AdapterTable:
    """The adapters on the device: which modules have room for them, and which adapter each slot holds."""

    def __init__(
        self,
        model: nn.Module,
        layers: nn.Module,
        slots: int,
        rank: int,
        targets: set[str] | None,
        affine: bool = False,
        parts: Mapping[str, Part] | None = None,
    ) -> None:
        """Put room for adapters beside the projections of layers; targets: the modules that get it, None for all.

        affine: whether adapters may have DoRA or biases. parts: of a shard, what it has of each projection; adapters are
        of the whole ones. model's projections must be in their final form (see replace_projections and use_cpu_kernels).
        """
        self.slots = slots
        self.rank = rank
        self.affine = affine
        names = {id(module): name for name, module in model.named_modules()}
        self._modules: dict[str, tuple[AdaptedLinear, int]] = {}
        self._known: dict[str, tuple[int, int]] = {}
        self._parts = parts or {}
        example = next(p for p in model.parameters() if p.is_floating_point())
        for parent in list(layers.modules()):
            for attributes, linear, sizes in list(_linears(parent)):
                members = [f"{names[id(parent)]}.{attribute}" for attribute in attributes]
                for member, size in zip(members, sizes, strict=True):
                    part = self._parts.get(member)
                    n, k = (size, linear.in_features) if part is None else part.whole
                    self._known[member] = (k, n)  # type: ignore[assignment]
                if targets is not None and targets.isdisjoint(members):
                    continue
                adapted = AdaptedLinear(linear, sizes, slots, rank, example, affine)
                first = getattr(parent, attributes[0])
                if isinstance(first, GroupMember):
                    first.linear = adapted
                else:
                    setattr(parent, attributes[0], adapted)
                self._modules |= {member: (adapted, part) for part, member in enumerate(members)}

    @property
    def is_shard(self) -> bool:
        """Whether the model is one of several ranks'."""
        return bool(self._parts)

    def check(self, name: str, adapter: Mapping[str, AdapterFactors]) -> None:
        """Raise CheckpointError unless the adapter is one of this model, of a rank that there is room for."""
        for module, factors in adapter.items():
            if module not in self._known:
                raise CheckpointError(f"adapter {name!r}: the model has no projection {module!r}; it is another base's")
            known = self._known[module]
            shape = (factors.a.shape[1], factors.b.shape[0]) if factors.rank else known
            if shape != known or (factors.bias is not None and factors.bias.numel() != known[1]):
                raise CheckpointError(
                    f"adapter {name!r}: {module} takes {shape[0]} and gives {shape[1]} features, the model's"
                    f" {known[0]} and {known[1]}; it is another base's"
                )
            if factors.rank > self.rank:
                raise CheckpointError(
                    f"adapter {name!r}: rank {factors.rank} is above engine.max_lora_rank ({self.rank})"
                )

    @torch.inference_mode()
    def write(self, slot: int, adapter: Mapping[str, AdapterFactors]) -> None:
        """Put a checked adapter into a slot that no sequence uses."""
        for module, (linear, part) in self._modules.items():
            factors, own = adapter.get(module), self._parts.get(module)
            linear.write(part, slot, factors if factors is None or own is None else _cut(factors, own))


def _cut(factors: AdapterFactors, part: Part) -> AdapterFactors:
    """An adapter's part. Where k is split, the ranks' results add up, as those of the base do."""
    return AdapterFactors(part.columns_of(factors.a), part.rows_of(factors.b))


def projections_of(model: nn.Module, layers: nn.Module) -> dict[str, tuple[int, int]]:
    """The numbers of inputs and outputs of layers' projections, by name in model, before an AdapterTable is made of them."""
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, tuple[int, int]] = {}
    for parent in layers.modules():
        for attributes, linear, sizes in _linears(parent):
            for attribute, size in zip(attributes, sizes, strict=True):
                found[f"{names[id(parent)]}.{attribute}"] = (int(linear.in_features), size)  # type: ignore[arg-type]
    return found


def _linears(parent: nn.Module) -> Iterator[tuple[tuple[str, ...], nn.Module, list[int]]]:
    """Yield a module's linear layers: the attributes whose projections are one GEMM, that GEMM's layer, and their sizes."""
    grouped: set[str] = set()
    for names in GROUPS:
        members = [own for name in names if isinstance(own := getattr(parent, name, None), GroupMember)]
        if len(members) == len(names):
            assert members[0].linear is not None
            grouped |= set(names)
            yield names, members[0].linear, [member.out_features for member in members]
    for name, child in parent.named_children():
        plain = isinstance(child, NF4Linear | CpuNF4Linear | Linear4bit | nn.Linear)
        if plain and name not in grouped and not isinstance(parent, GroupMember | AdaptedLinear):
            yield (name,), child, [int(child.out_features)]  # type: ignore[arg-type]
