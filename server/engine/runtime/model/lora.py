"""LoRA adapters beside the base's projections: every token of a batch gets its own sequence's adapter, or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from bitsandbytes.nn import Linear4bit
from torch import nn

from nf4_kernels import cpu, ops
from server.checkpoint.base import CheckpointError
from server.checkpoint.lora import AdapterFactors
from server.engine.runtime.batch import Batch
from server.engine.runtime.model.cpu_linear import Bf16Linear, CpuNF4Linear
from server.engine.runtime.model.projections import NF4Linear

# Up to this many tokens times slots, multiplying by all slots' factors at once costs less than picking each row's.
FEW = 64


@dataclass(frozen=True)
class Rows:
    """The slots of a batch's adapters, each with its rows: a slice where they are contiguous."""

    count: int
    parts: tuple[tuple[int, slice | torch.Tensor], ...]


class _Active:
    """Adapters that the running forward pass adds; the engine runs one at a time."""

    rows: Rows | None = None
    others: torch.Tensor | None = None
    """bool [tokens, slots]: whether a slot's adapter is not the token's; if set, rows are not used (see others_of)."""
    batch: Batch | None = None
    """The batch, where sequences of it have adapters; None in CUDA graphs."""


def _add(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """y [..., N] += each row's adapter of x [..., K]; a [slots, R, K], b [slots, R, N]."""
    rows, others = _Active.rows, _Active.others
    if rows is None and others is None:
        return
    out, inputs = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
    count = rows.count if others is None and rows is not None else inputs.shape[0]
    if inputs.shape[0] != count:
        raise RuntimeError(f"a projection with adapters got {inputs.shape[0]} of the batch's {count} tokens")
    if others is not None:
        # All slots' factors at once. Results of slots that are not the row's are replaced, because they may be infinite,
        # and infinity times zero is not a number.
        inner = torch.mm(inputs, a.view(-1, a.shape[2]).T).view(-1, *a.shape[:2])
        inner.masked_fill_(others[: inner.shape[0], :, None], 0)
        out.addmm_(inner.flatten(1), b.view(-1, b.shape[2]))
    elif rows is not None:
        for slot, where in rows.parts:
            if isinstance(where, slice):
                out[where].addmm_(inputs[where] @ a[slot].T, b[slot])
            else:
                out.index_add_(0, where, inputs[where] @ a[slot].T @ b[slot])


def _scale(y: torch.Tensor, excess: torch.Tensor, shift: torch.Tensor) -> None:
    """y [..., N] = y * (1 + each row's excess) + its shift; excess and shift [slots, N]."""
    rows, others = _Active.rows, _Active.others
    out = y.view(-1, y.shape[-1])
    if others is not None:
        own = (~others[: out.shape[0]]).to(out.dtype)
        out.mul_(own @ excess + 1).add_(own @ shift)
    elif rows is not None:
        for slot, where in rows.parts:
            out[where] = out[where] * (excess[slot] + 1) + shift[slot]


class AdaptedLinear(nn.Module):
    """A projection, or several joined into one GEMM, and room for slots adapters of up to rank each.

    Joined projections have one pair of factors with all their ranks. The second factor is zero where the rank belongs to
    one projection and the column to another, so that one pair of GEMMs serves all of them.
    """

    a: torch.Tensor
    b: torch.Tensor
    excess: torch.Tensor | None
    """[slots, out_features]: what outputs are multiplied by, less one, where an adapter scales them (DoRA)."""
    shift: torch.Tensor | None
    """[slots, out_features]: what is added to them then."""

    def __init__(
        self, base: nn.Module, sizes: list[int], slots: int, rank: int, example: torch.Tensor, affine: bool = False
    ) -> None:
        """affine: whether adapters may have DoRA or biases, too."""
        super().__init__()
        self.base = base
        self.sizes = sizes
        self.rank = rank
        self.in_features: int = base.in_features  # type: ignore[assignment]
        self.out_features = sum(sizes)
        ranks = len(sizes) * rank
        self.register_buffer("a", example.new_zeros(slots, ranks, self.in_features), persistent=False)
        self.register_buffer("b", example.new_zeros(slots, ranks, self.out_features), persistent=False)
        for name in ("excess", "shift"):
            zeros = example.new_zeros(slots, self.out_features) if affine else None
            self.register_buffer(name, zeros, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] to [..., out_features]."""
        y: torch.Tensor = self.base(x)
        if self.excess is not None and self.shift is not None:
            _scale(y, self.excess, self.shift)
        _add(y, x, self.a, self.b)
        return y

    def write(self, part: int, slot: int, factors: AdapterFactors | None) -> None:
        """Put one part's factors into a slot; None: zeros."""
        start, row = sum(self.sizes[:part]), part * self.rank
        columns = slice(start, start + self.sizes[part])
        a, b = self.a[slot, row : row + self.rank], self.b[slot, row : row + self.rank, columns]
        a.zero_()
        b.zero_()
        gain: torch.Tensor | float = 1.0
        if self.excess is not None and self.shift is not None:
            gain, shift = self._affine(columns, factors)
            self.excess[slot, columns] = gain - 1
            self.shift[slot, columns] = shift
        if factors is not None and factors.rank:
            a[: factors.rank].copy_(factors.a)
            b[: factors.rank].copy_(factors.b.T.to(b.device) * gain)

    def _affine(self, columns: slice, factors: AdapterFactors | None) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 gain and shift of a part: the base's outputs are multiplied by the gain, then the shift is added."""
        device, size = self.a.device, columns.stop - columns.start
        gain, shift = torch.ones(size, device=device), torch.zeros(size, device=device)
        if factors is None:
            return gain, shift
        if factors.magnitude is not None:
            weight = dequantized(self.base, torch.float32)[columns]
            weight += factors.b.to(device).float() @ factors.a.to(device).float()
            gain = factors.magnitude.to(device) / torch.linalg.norm(weight, dim=1)
        if factors.shift is not None:
            shift += gain * factors.shift.to(device)
        bias = bias_of(self.base)
        own = torch.zeros(size, device=device) if bias is None else bias[columns].float()
        new = own if factors.bias is None else factors.bias.to(device)
        return gain, shift + new - gain * own

    def extra_repr(self) -> str:
        """Text that print(model) has of it."""
        return f"slots={self.a.shape[0]}, rank={self.rank}"


def dequantized(base: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """A linear layer's weight [out_features, in_features] in dtype, a copy. CheckpointError where it cannot be had."""
    if isinstance(base, NF4Linear):
        return ops.dequantize(base.weight, dtype)
    if isinstance(base, CpuNF4Linear):
        return cpu.dequantize(base.weight, dtype)
    if isinstance(base, nn.Linear) and not isinstance(base, Linear4bit):
        return base.weight.detach().to(dtype, copy=True)
    if isinstance(base, Bf16Linear):
        return base.weight.to(dtype=dtype, copy=True)
    raise CheckpointError(f"an adapter needs the weight of a {type(base).__name__}, which cannot be expanded")


def bias_of(base: nn.Module) -> torch.Tensor | None:
    """A linear layer's bias."""
    bias: torch.Tensor | None = base.own_bias if isinstance(base, CpuNF4Linear) else base.bias  # type: ignore[assignment]
    return bias


@contextmanager
def adding(batch: Batch, slots: int) -> Iterator[None]:
    """While entered, projections add the adapters of a batch's sequences; slots is how many adapters there may be."""
    if slots and batch.spans.adapted:
        several = len({*batch.spans.adapters} - {None}) > 1
        few = several and batch.num_tokens * slots <= FEW
        _Active.others = others_of(batch, slots).to(batch.ids.device, non_blocking=True) if few else None
        _Active.rows = None if few else _rows_by_slot(batch)
        _Active.batch = batch
    try:
        yield
    finally:
        _Active.rows = _Active.others = _Active.batch = None


@contextmanager
def adding_masked(others: torch.Tensor | None) -> Iterator[None]:
    """While entered, projections add the adapters that others does not mask (see others_of); None: they add nothing.

    It is for CUDA graphs, whose work is always the same.
    """
    _Active.others = others
    try:
        yield
    finally:
        _Active.others = None


def slots_of_rows(count: int, *, sampled: bool) -> tuple[torch.Tensor, frozenset[int] | None] | None:
    """int64 [count] of each token's slot, or -1, and which slots there are (None: any); None where no adapter is added.

    sampled: of the tokens whose logits are wanted. In CUDA graphs these are all.
    """
    batch, others = _Active.batch, _Active.others
    if batch is not None:
        own = [-1 if span.adapter is None else span.adapter for span in batch.spans for _ in range(span.length)]
        slots = torch.tensor(own).to(batch.ids.device, non_blocking=True)
        return slots[batch.sampled_rows] if sampled else slots, frozenset(own) - {-1}
    if others is None:
        return None
    mine = ~others[:count]
    return torch.where(mine.any(1), mine.int().argmax(1), -1), None


def others_of(batch: Batch, slots: int) -> torch.Tensor:
    """bool [tokens, slots] on the CPU: whether the slot is not that of the token's sequence."""
    own = [-1 if span.adapter is None else span.adapter for span in batch.spans for _ in range(span.length)]
    return torch.tensor(own)[:, None] != torch.arange(slots)


def _rows_by_slot(batch: Batch) -> Rows:
    rows: dict[int, list[int]] = {}
    for span in batch.spans:
        if span.adapter is not None:
            rows.setdefault(span.adapter, []).extend(range(span.row, span.row + span.length))
    device = batch.ids.device
    return Rows(batch.num_tokens, tuple((slot, _index(own, device)) for slot, own in sorted(rows.items())))


def _index(rows: list[int], device: torch.device) -> slice | torch.Tensor:
    contiguous = rows[-1] - rows[0] == len(rows) - 1
    return slice(rows[0], rows[-1] + 1) if contiguous else torch.tensor(rows).to(device, non_blocking=True)
