"""LoRA adapters beside the base's projections: every token of a batch gets its own sequence's adapter, or none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from bitsandbytes.nn import Linear4bit
from torch import nn

from server.checkpoint.base import CheckpointError
from server.checkpoint.lora import AdapterFactors
from server.engine.runtime.batch import Batch
from server.engine.runtime.cpu_linear import CpuNF4Linear
from server.engine.runtime.projections import GROUPS, GroupMember, NF4Linear


@dataclass(frozen=True)
class Rows:
    """Which of a batch's rows belong to which slot: slot and its rows, a slice where they are contiguous."""

    count: int
    parts: tuple[tuple[int, slice | torch.Tensor], ...]


class _Active:
    """What the forward pass that is running adds; the engine runs one at a time."""

    rows: Rows | None = None
    mask: torch.Tensor | None = None
    """bool [tokens, slots], whether the slot is the row's: for CUDA graphs, whose work cannot depend on the batch;
    takes the place of rows."""


def _add(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sizes: list[int]) -> None:
    """y [..., N] += each row's adapter of x [..., K].

    a [slots, parts, rank, K], b [N, slots, rank]: sizes are the parts' shares of N.
    """
    rows, mask = _Active.rows, _Active.mask
    if rows is None and mask is None:
        return
    out, inputs = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
    if mask is not None:
        _add_masked(out, inputs, a, b, sizes, mask[: inputs.shape[0]])
        return
    assert rows is not None
    if inputs.shape[0] != rows.count:
        raise RuntimeError(f"a projection with adapters got {inputs.shape[0]} of the batch's {rows.count} tokens")
    for slot, where in rows.parts:
        own = inputs[where]
        inner = (own @ a[slot].flatten(0, 1).T).split(a.shape[2], -1)
        factors = b[:, slot].split(sizes)
        delta = torch.cat([h @ factor.T for h, factor in zip(inner, factors, strict=True)], -1)
        out[where] += delta


def _add_masked(
    out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sizes: list[int], mask: torch.Tensor
) -> None:
    """Two plain products with all slots' factors at once, between them zeros for those that are not the row's."""
    # What does not count is replaced, not multiplied by zero: it may be infinite.
    inner = (x @ a.view(-1, a.shape[3]).T).view(-1, *a.shape[:3]).masked_fill(~mask[:, :, None, None], 0)
    columns = out.split(sizes, -1)
    for part, (column, factor) in enumerate(zip(columns, b.flatten(1).split(sizes), strict=True)):
        column.addmm_(inner[:, :, part].flatten(1), factor.T)


_library = torch.library.Library("nf4_server_lora", "DEF")
_library.define("add(Tensor(a!) y, Tensor x, Tensor a, Tensor b, int[] sizes) -> ()")
_library.impl("add", _add, "CPU")
_library.impl("add", _add, "CUDA")


@torch.library.register_fake("nf4_server_lora::add")  # type: ignore[untyped-decorator]
def _(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sizes: list[int]) -> None:
    return None


class AdaptedLinear(nn.Module):
    """A projection, or several joined into one product, and room for slots adapters of up to rank each."""

    a: torch.Tensor
    b: torch.Tensor

    def __init__(self, base: nn.Module, sizes: list[int], slots: int, rank: int, example: torch.Tensor) -> None:
        super().__init__()
        self.base = base
        self.sizes = sizes
        self.in_features: int = base.in_features  # type: ignore[assignment]
        self.out_features = sum(sizes)
        self.register_buffer("a", example.new_zeros(slots, len(sizes), rank, self.in_features), persistent=False)
        self.register_buffer("b", example.new_zeros(self.out_features, slots, rank), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] to [..., out_features]."""
        y: torch.Tensor = self.base(x)
        torch.ops.nf4_server_lora.add(y, x, self.a, self.b, self.sizes)
        return y

    def write(self, part: int, slot: int, factors: AdapterFactors | None) -> None:
        """Put one part's factors into a slot; None: zeros."""
        start = sum(self.sizes[:part])
        a, b = self.a[slot, part], self.b[start : start + self.sizes[part], slot]
        a.zero_()
        b.zero_()
        if factors is not None:
            a[: factors.rank].copy_(factors.a)
            b[:, : factors.rank].copy_(factors.b)

    def extra_repr(self) -> str:
        """What print(model) says of it."""
        return f"slots={self.a.shape[0]}, rank={self.a.shape[2]}"


class AdapterTable:
    """The adapters on the device: which module has room for them, and what is in each slot."""

    def __init__(self, model: nn.Module, layers: nn.Module, slots: int, rank: int, targets: set[str] | None) -> None:
        """Put room for adapters beside the projections of layers; targets: the modules that get it, None for all.

        model's projections must be in their final form (see replace_projections and use_cpu_kernels).
        """
        self.slots = slots
        self.rank = rank
        names = {id(module): name for name, module in model.named_modules()}
        self._modules: dict[str, tuple[AdaptedLinear, int]] = {}
        self._known: dict[str, tuple[int, int]] = {}
        example = next(p for p in model.parameters() if p.is_floating_point())
        for parent in list(layers.modules()):
            for attributes, product, sizes in list(_products(parent)):
                members = [f"{names[id(parent)]}.{attribute}" for attribute in attributes]
                for member, size in zip(members, sizes, strict=True):
                    self._known[member] = (product.in_features, size)  # type: ignore[assignment]
                if targets is not None and targets.isdisjoint(members):
                    continue
                adapted = AdaptedLinear(product, sizes, slots, rank, example)
                first = getattr(parent, attributes[0])
                if isinstance(first, GroupMember):
                    first.product = adapted
                else:
                    setattr(parent, attributes[0], adapted)
                self._modules |= {member: (adapted, part) for part, member in enumerate(members)}

    def check(self, name: str, adapter: Mapping[str, AdapterFactors]) -> None:
        """Raise CheckpointError unless the adapter is one of this model, with room for its rank."""
        for module, factors in adapter.items():
            if module not in self._known:
                raise CheckpointError(f"adapter {name!r}: the model has no projection {module!r}; it is another base's")
            shape = (factors.a.shape[1], factors.b.shape[0])
            if shape != self._known[module]:
                raise CheckpointError(
                    f"adapter {name!r}: {module} takes {shape[0]} and gives {shape[1]} features, the model's"
                    f" {self._known[module][0]} and {self._known[module][1]}; it is another base's"
                )
            if factors.rank > self.rank:
                raise CheckpointError(
                    f"adapter {name!r}: rank {factors.rank} is above engine.max_lora_rank ({self.rank})"
                )

    @torch.inference_mode()
    def write(self, slot: int, adapter: Mapping[str, AdapterFactors]) -> None:
        """Put a checked adapter into a slot that no sequence uses."""
        for module, (linear, part) in self._modules.items():
            linear.write(part, slot, adapter.get(module))


@contextmanager
def adding(batch: Batch) -> Iterator[None]:
    """While entered, projections add the adapters of a batch's sequences."""
    _Active.rows = _rows_by_slot(batch)
    try:
        yield
    finally:
        _Active.rows = None


@contextmanager
def adding_masked(mask: torch.Tensor | None) -> Iterator[None]:
    """While entered, projections add what mask says (see mask_of); None adds nothing."""
    _Active.mask = mask
    try:
        yield
    finally:
        _Active.mask = None


def _rows_by_slot(batch: Batch) -> Rows | None:
    """The rows of each slot, or None when no sequence has an adapter."""
    rows: dict[int, list[int]] = {}
    for span in batch.spans:
        if span.adapter is not None:
            rows.setdefault(span.adapter, []).extend(range(span.row, span.row + span.length))
    if not rows:
        return None
    device = batch.ids.device
    return Rows(batch.num_tokens, tuple((slot, _index(own, device)) for slot, own in sorted(rows.items())))


def _index(rows: list[int], device: torch.device) -> slice | torch.Tensor:
    contiguous = rows[-1] - rows[0] == len(rows) - 1
    return slice(rows[0], rows[-1] + 1) if contiguous else torch.tensor(rows).to(device, non_blocking=True)


def mask_of(batch: Batch, slots: int) -> torch.Tensor:
    """bool [spans, slots] on the CPU: whether the slot is the span's."""
    own = torch.tensor([-1 if span.adapter is None else span.adapter for span in batch.spans])
    return own[:, None] == torch.arange(slots)


def _products(parent: nn.Module) -> Iterator[tuple[tuple[str, ...], nn.Module, list[int]]]:
    """A module's linear layers: the attributes of those that are one product, the product, and their sizes."""
    grouped: set[str] = set()
    for names in GROUPS:
        first = getattr(parent, names[0], None)
        if isinstance(first, GroupMember) and first.product is not None:
            sizes = [int(getattr(parent, name).out_features) for name in names]
            grouped |= set(names)
            yield names, first.product, sizes
    for name, child in parent.named_children():
        plain = isinstance(child, NF4Linear | CpuNF4Linear | Linear4bit | nn.Linear)
        if plain and name not in grouped and not isinstance(parent, GroupMember | AdaptedLinear):
            yield (name,), child, [int(child.out_features)]  # type: ignore[arg-type]
