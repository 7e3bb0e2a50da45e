"""Loads experts in transformers' stead: NF4 as it was saved, or other tensors, which are quantized one at a time."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from nf4_kernels import Weight
from nf4_kernels.reference import dequantize
from server.checkpoint.base import CheckpointError, Progress
from server.checkpoint.experts.layout import ExpertsLayout, experts_layouts, replace_experts
from server.checkpoint.experts.module import NF4Experts, StackedWeight
from server.checkpoint.experts.names import TAKEN, Part, is_nf4, is_packed, place_of, router_of
from server.checkpoint.experts.tensors import BLOCKSIZE, CheckpointTensors, quantize, stack, with_rows

logger = logging.getLogger(__name__)


@dataclass
class _Names:
    """The names of one layer's tensors: of weights and biases by part and expert (None: all in one), of its router."""

    weights: dict[tuple[Part, int | None], str] = field(default_factory=dict)
    biases: dict[tuple[Part, int | None], str] = field(default_factory=dict)
    router: dict[str, str] = field(default_factory=dict)


class ExpertsLoader:
    """Takes experts and NF4 routers out of a model before transformers loads it, and loads them afterwards."""

    def __init__(self, tensors: CheckpointTensors, device: torch.device, dtype: torch.dtype, quantizes: bool) -> None:
        """quantizes: whether experts that the checkpoint has in 16 bit become NF4, too; else they stay transformers' own."""
        self._tensors = tensors
        self._device = device
        self._dtype = dtype
        self._quantizes = quantizes
        self._layouts: list[ExpertsLayout] = []
        self._routers: list[tuple[str, dict[str, str], tuple[int, int]]] = []
        self._names: dict[int, _Names] = {}
        self._quantized_here = 0
        for name in tensors.names:
            if place := place_of(name):
                own = self._names.setdefault(place.layer, _Names())
                (own.biases if place.bias else own.weights)[place.part, place.expert] = name
            elif router := router_of(name):
                self._names.setdefault(router[0], _Names()).router[router[1]] = name

    def take_over(self, model: PreTrainedModel) -> None:
        """Remove from model everything that fill() will load. Raises CheckpointError for NF4 experts of an unknown kind."""
        for layout in list(experts_layouts(model)):
            names = self._names.get(layout.layer, _Names())
            self._take_router(model, layout, names)
            saved = next((name for name in names.weights.values() if is_packed(name, self._tensors)), None)
            # Llama 4's own code runs every expert on every token, so its experts are ours even where they are in 16 bit.
            if saved is None and not self._quantizes and layout.kind != Llama4TextExperts.__name__:
                continue
            if layout.activation is None:
                if saved is not None:
                    raise CheckpointError(f"{self._tensors.folder}: {saved}: {layout.kind} in NF4 are not served")
                continue
            placeholder = nn.Module()
            placeholder._is_hf_initialized = True  # type: ignore[assignment]
            model.set_submodule(layout.name, placeholder)
            self._layouts.append(layout)
        if self._layouts or self._routers:
            ignored = model._keys_to_ignore_on_load_unexpected or ()
            model._keys_to_ignore_on_load_unexpected = {*ignored, *TAKEN}

    def _take_router(self, model: nn.Module, layout: ExpertsLayout, names: _Names) -> None:
        """Take a router that is in NF4, or a linear layer in a module of its own, where the model has just a parameter."""
        parent = layout.name.rpartition(".")[0]
        for name in ("gate", "router"):
            router = getattr(model.get_submodule(parent), name, None)
            weight = None if router is None else router._parameters.get("weight")
            if router is None or weight is None or weight.shape != (layout.count, layout.hidden):
                continue
            saved = names.router.get("weight")
            if saved is None or not (is_nf4(saved, self._tensors) or ".linear." in saved):
                continue
            for part in names.router:
                router._parameters.pop(part, None)
            router._is_hf_initialized = True
            self._routers.append((f"{parent}.{name}", names.router, (layout.count, layout.hidden)))

    def fill(self, model: PreTrainedModel, progress: Progress) -> None:
        """Load what take_over() took. Raises CheckpointError, by name, for tensors that are missing or do not fit."""
        for name, saved, shape in self._routers:
            router = model.get_submodule(name)
            for part, tensor in saved.items():
                router.register_parameter(part, nn.Parameter(self._router(tensor, part, shape), requires_grad=False))
        for done, layout in enumerate(self._layouts):
            progress("loading experts", done / len(self._layouts))
            replace_experts(model, layout, self._experts(layout))
        self._report(model)

    def _router(self, name: str, part: str, shape: tuple[int, int]) -> torch.Tensor:
        if is_nf4(name, self._tensors):
            return dequantize(self._tensors.read_nf4(name, shape), self._dtype).to(self._device)
        return self._tensors.read_float(name, shape if part == "weight" else shape[:1]).to(self._device, self._dtype)

    def _experts(self, layout: ExpertsLayout) -> NF4Experts:
        reader = _LayerReader(self._tensors, layout, self._names.get(layout.layer, _Names()), self._device)
        gate_up = StackedWeight(reader.gate_up(), self._to(reader.bias("gate_up")))
        down = StackedWeight(reader.down(), self._to(reader.bias("down")))
        self._quantized_here += reader.quantized
        assert layout.activation is not None
        return NF4Experts(gate_up, down, layout.activation)

    def _to(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        return None if bias is None else bias.to(self._device, self._dtype)

    def _report(self, model: PreTrainedModel) -> None:
        """Log what was found, such as "48 layers of 128 experts in NF4, router in bfloat16"."""
        ours = {layout.name for layout in self._layouts}
        kinds = Counter((layout.count, True) for layout in self._layouts)
        kinds.update((layout.count, False) for layout in experts_layouts(model) if layout.name not in ours)
        dtype = str(self._dtype).removeprefix("torch.")
        router = (
            f"{dtype}, expanded from NF4"
            if any(is_nf4(names["weight"], self._tensors) for _, names, _ in self._routers)
            else dtype
        )
        for (count, nf4), layers in kinds.items():
            what, plural = "NF4" if nf4 else dtype, "" if layers == 1 else "s"
            logger.info("%d layer%s of %d experts in %s, router in %s", layers, plural, count, what, router)
        if self._quantized_here and not self._quantizes:
            logger.warning(
                "%d experts' weights that the checkpoint has in 16 bit beside NF4 were quantized",
                self._quantized_here,
            )


class _LayerReader:
    """Reads the weights and biases of one layer's experts in whatever form the checkpoint has them."""

    def __init__(self, tensors: CheckpointTensors, layout: ExpertsLayout, names: _Names, device: torch.device) -> None:
        self._tensors = tensors
        self._layout = layout
        self._names = names
        self._device = device
        self.quantized = 0
        """Weights that were not in NF4."""
        for _, expert in (*names.weights, *names.biases):
            if expert is not None and expert >= layout.count:
                raise CheckpointError(
                    f"{tensors.folder}: {layout.name}: tensors of expert {expert}, config.json says {layout.count} experts"
                )

    def gate_up(self) -> Weight:
        """[experts, 2 inner, hidden], gates before ups."""
        inner, hidden = self._layout.inner, self._layout.hidden
        if ("gate_up", None) in self._names.weights:
            return self._stacked("gate_up", 2 * inner, hidden)
        parts: tuple[Part, ...] = (
            ("gate_up",) if any(part == "gate_up" for part, _ in self._names.weights) else ("gate", "up")
        )
        rows = 2 * inner // len(parts)
        matrices = [self._matrix(part, expert, rows, hidden) for expert in range(self._layout.count) for part in parts]
        if parts == ("gate_up",) and self._layout.interleaved:
            matrices = [self._deinterleaved(matrix, expert) for expert, matrix in enumerate(matrices)]
        return self._stack(matrices, "gate_up", 2 * inner, hidden)

    def down(self) -> Weight:
        """[experts, hidden, inner]."""
        inner, hidden = self._layout.inner, self._layout.hidden
        if ("down", None) in self._names.weights:
            return self._stacked("down", hidden, inner)
        matrices = [self._matrix("down", expert, hidden, inner) for expert in range(self._layout.count)]
        return self._stack(matrices, "down", hidden, inner)

    def bias(self, part: Part) -> torch.Tensor | None:
        """[experts, rows of part] in float32; None where there are none."""
        biases, count, inner = self._names.biases, self._layout.count, self._layout.inner
        if not any((own == "down") == (part == "down") for own, _ in biases):
            return None
        rows = 2 * inner if part == "gate_up" else self._layout.hidden
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
        return found[:, _gates_first(rows)] if interleaved else found

    def _name(self, names: dict[tuple[Part, int | None], str], part: Part, expert: int, what: str) -> str:
        """The name of one expert's tensor; CheckpointError where there is none."""
        if (part, expert) not in names:
            name = f"{self._layout.name}.{expert}.{part}_proj.{what}"
            raise CheckpointError(f"{self._tensors.folder}: damaged: missing keys: {name}, or one that means the same")
        return names[part, expert]

    def _matrix(self, part: Part, expert: int, rows: int, columns: int) -> Weight:
        """One expert's weight [rows, columns]; where it is not in NF4, quantized on the device."""
        name = self._name(self._names.weights, part, expert, "weight")
        if is_nf4(name, self._tensors):
            return self._tensors.read_nf4(name, (rows, columns))
        matrix = self._tensors.read_float(name, (rows, columns)).to(self._device)
        return self._quantize(matrix, name)

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
            return self._stacked_nf4(name, rows, columns)
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
                matrices += [self._quantize(half, name) for half in matrix.chunk(2)]
            else:
                matrices.append(self._quantize(matrix, name))
        return self._stack(matrices, part, rows, columns)

    def _stacked_nf4(self, name: str, rows: int, columns: int) -> Weight:
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
        return stack([whole], (count, rows, columns), self._device, rows * columns)

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
