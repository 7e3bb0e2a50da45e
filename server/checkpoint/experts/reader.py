"""Reads one layer's experts, or a shard's part of them, in whatever form a checkpoint has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from nf4_kernels import Weight
from server.checkpoint.base import CheckpointError
from server.checkpoint.experts.layout import ExpertsLayout
from server.checkpoint.experts.names import Part, is_nf4
from server.checkpoint.experts.tensors import BLOCKSIZE, CheckpointTensors, quantize, stack, with_rows


class Cut(Protocol):
    """Part that a shard keeps of every expert."""

    @property
    def whole(self) -> int:
        """Features between an expert's gates, ups and downs."""

    @property
    def inner(self) -> int:
        """Number of these that are kept, zeros included."""

    def weight(self, weight: Weight, part: Part, interleaved: bool) -> Weight:
        """Cut a weight [.., n, k] of one expert or of several to what is kept; ValueError if it cannot be cut so.

        Of a gate_up the gates are in front of the ups, or the rows of both take turns (interleaved), then also in what is
        kept.
        """

    def bias(self, bias: torch.Tensor, part: Part) -> torch.Tensor | None:
        """Cut the biases [experts, rows] of gate_up, gates first, or of down to what is kept."""


@dataclass
class Names:
    """The names of one layer's tensors: of weights and biases by part and expert (None: all in one), of its router."""

    weights: dict[tuple[Part, int | None], str] = field(default_factory=dict)
    biases: dict[tuple[Part, int | None], str] = field(default_factory=dict)
    router: dict[str, str] = field(default_factory=dict)


class LayerReader:
    """Reads the weights and biases of one layer's experts in whatever form the checkpoint has them."""

    def __init__(
        self,
        tensors: CheckpointTensors,
        layout: ExpertsLayout,
        names: Names,
        device: torch.device,
        cut: Cut | None = None,
    ) -> None:
        """layout: of the whole experts; cut: what is kept of them, None for all."""
        self._tensors = tensors
        self._layout = layout
        self._names = names
        self._device = device
        self._cut = cut
        self._inner = layout.inner if cut is None else cut.inner
        """Features between gates, ups and downs that are kept."""
        self.quantized = 0
        """Weights that were not in NF4."""
        for _, expert in (*names.weights, *names.biases):
            if expert is not None and expert >= layout.count:
                raise CheckpointError(
                    f"{tensors.folder}: {layout.name}: tensors of expert {expert}, config.json says {layout.count} experts"
                )

    def gate_up(self) -> Weight:
        """[experts, 2 inner, hidden] of the features that are kept, gates before ups; of ups alone without gates."""
        inner, hidden = self._layout.inner, self._layout.hidden
        whole: Part = "gate_up" if self._layout.rows == 2 else "up"
        if (whole, None) in self._names.weights:
            return self._stacked(whole, self._layout.rows * inner, hidden)
        is_whole = whole == "up" or any(part == whole for part, _ in self._names.weights)
        parts: tuple[Part, ...] = (whole,) if is_whole else ("gate", "up")
        rows = self._layout.rows * inner // len(parts)
        matrices = [self._matrix(part, expert, rows, hidden) for expert in range(self._layout.count) for part in parts]
        if parts == ("gate_up",) and self._layout.interleaved:
            matrices = [self._deinterleaved(matrix, expert) for expert, matrix in enumerate(matrices)]
        return self._stack(matrices, "gate_up", self._layout.rows * self._inner, hidden)

    def down(self) -> Weight:
        """[experts, hidden, inner] of the features that are kept."""
        inner, hidden = self._layout.inner, self._layout.hidden
        if ("down", None) in self._names.weights:
            return self._stacked("down", hidden, inner)
        matrices = [self._matrix("down", expert, hidden, inner) for expert in range(self._layout.count)]
        return self._stack(matrices, "down", hidden, self._inner)

    def bias(self, part: Part) -> torch.Tensor | None:
        """[experts, rows of part] in float32, as far as they are kept; None where there are none."""
        biases, count, inner = self._names.biases, self._layout.count, self._layout.inner
        if not any((own == "down") == (part == "down") for own, _ in biases):
            return None
        rows = self._layout.rows * inner if part == "gate_up" else self._layout.hidden
        if (part, None) in biases:
            found = self._tensors.read_float(biases[part, None], (count, rows)).float()
        else:
            parts: tuple[Part, ...] = (part,) if (part, 0) in biases or part == "down" else ("gate", "up")
            read = [
                self._tensors.read_float(self._name(biases, own, expert, "bias"), (rows // len(parts),)).float()
                for expert in range(count)
                for own in parts
            ]
            found = torch.cat(read).view(count, rows)
        interleaved = part == "gate_up" and self._layout.interleaved and ("gate", 0) not in biases
        found = found[:, _gates_first(rows)] if interleaved else found
        return found if self._cut is None else self._cut.bias(found, part)

    def _name(self, names: dict[tuple[Part, int | None], str], part: Part, expert: int, what: str) -> str:
        """The name of one expert's tensor; CheckpointError where there is none."""
        if (part, expert) not in names:
            name = f"{self._layout.name}.{expert}.{part}_proj.{what}"
            raise CheckpointError(f"{self._tensors.folder}: damaged: missing keys: {name}, or one that means the same")
        return names[part, expert]

    def _matrix(self, part: Part, expert: int, rows: int, columns: int) -> Weight:
        """Cut one expert's weight [rows, columns] to what is kept; if it is not in NF4, it is quantized on the device."""
        name = self._name(self._names.weights, part, expert, "weight")
        if is_nf4(name, self._tensors):
            return self._kept(self._tensors.read_nf4(name, (rows, columns)), part, name)
        matrix = self._tensors.read_float(name, (rows, columns)).to(self._device)
        return self._kept(self._quantize(matrix, name), part, name)

    def _kept(self, weight: Weight, part: Part, name: str) -> Weight:
        """Cut a weight [.., n, k] of one expert or of several, one after another, to what is kept."""
        if self._cut is None:
            return weight
        try:
            return self._cut.weight(weight, part, part == "gate_up" and self._layout.interleaved)
        except ValueError as e:
            raise CheckpointError(f"{self._tensors.folder}: {name} cannot be divided: {e}") from e

    def _quantize(self, matrix: torch.Tensor, name: str) -> Weight:
        if matrix.numel() % BLOCKSIZE:
            raise CheckpointError(
                f"{self._tensors.folder}: {name}: {list(matrix.shape)} is not a multiple of {BLOCKSIZE}"
            )
        if not matrix.isfinite().all():
            raise self._tensors.error(name, "has weights that are not finite numbers")
        self.quantized += 1
        return quantize(matrix)

    def _stacked(self, part: Part, rows: int, columns: int) -> Weight:
        """All experts' weights from one tensor, whose dimensions are in the model's order or in the other one."""
        name, count = self._names.weights[part, None], self._layout.count
        if is_nf4(name, self._tensors):
            return self._stacked_nf4(name, part, rows, columns)
        saved = tuple(self._tensors.shape(name))
        transposed = self._layout.transposed
        if saved != ((count, columns, rows) if transposed else (count, rows, columns)):
            transposed = not transposed
        shape = (count, columns, rows) if transposed else (count, rows, columns)
        matrices = []
        for expert in range(count):
            matrix = self._tensors.read_part(name, expert, shape).to(self._device)
            matrix = matrix.T if transposed else matrix
            if part == "gate_up":
                matrix = matrix[_gates_first(rows).to(matrix.device)] if self._layout.interleaved else matrix
                halves: tuple[Part, Part] = ("gate", "up")
                read = zip(matrix.chunk(2), halves, strict=True)
                matrices += [self._kept(self._quantize(half, name), own, name) for half, own in read]
            else:
                matrices.append(self._kept(self._quantize(matrix, name), part, name))
        return self._stack(matrices, part, *self._kept_shape(part))

    def _stacked_nf4(self, name: str, part: Part, rows: int, columns: int) -> Weight:
        """The experts of one NF4 tensor; its blocks run along the inputs only where the model is not transposed."""
        if self._layout.transposed or self._layout.interleaved:
            raise CheckpointError(
                f"{self._tensors.folder}: {name}: NF4 of {self._layout.kind} stacked in one tensor is not served;"
                " save one tensor for each expert"
            )
        count = self._layout.count
        whole = self._tensors.read_nf4(name, (count, rows, columns))
        if rows * columns % whole.blocksize:
            raise CheckpointError(
                f"{self._tensors.folder}: {name}: its experts share scale blocks, which is not served"
            )
        n, k = self._kept_shape(part)
        return stack([self._kept(whole, part, name)], (count, n, k), self._device, n * k)

    def _kept_shape(self, part: Part) -> tuple[int, int]:
        """The shape of one expert's weight, as far as it is kept."""
        hidden = self._layout.hidden
        return (hidden, self._inner) if part == "down" else (self._layout.rows * self._inner, hidden)

    def _deinterleaved(self, matrix: Weight, expert: int) -> Weight:
        name = self._names.weights["gate_up", expert]
        if matrix.shape[1] % matrix.blocksize:
            raise CheckpointError(f"{self._tensors.folder}: {name}: its rows share scale blocks, which is not served")
        return with_rows(matrix, _gates_first(matrix.shape[0]).to(matrix.packed.device))

    def _stack(self, matrices: list[Weight], part: Part, rows: int, columns: int) -> Weight:
        first = matrices[0]
        for index, matrix in enumerate(matrices):
            count = matrix.shape[0] * matrix.shape[1]
            if matrix.blocksize != first.blocksize or count % matrix.blocksize:
                expert = index * self._layout.count // len(matrices)
                raise CheckpointError(
                    f"{self._tensors.folder}: {self._layout.name}: {part} of expert {expert} has {count} weights in scale"
                    f" blocks of {matrix.blocksize}; whole blocks of {first.blocksize} are needed"
                )
        return stack(matrices, (self._layout.count, rows, columns), self._device, rows * columns)


def _gates_first(rows: int) -> torch.Tensor:
    """The rows of interleaved gates and ups: those of the gates, and after these those of the ups."""
    return torch.arange(rows).view(-1, 2).T.reshape(-1)
