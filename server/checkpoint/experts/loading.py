"""Loads experts in transformers' stead: NF4 as it was saved, or other tensors, which are quantized one at a time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from nf4_kernels.reference import dequantize
from server.checkpoint.base import CheckpointError, Progress
from server.checkpoint.experts.layout import ExpertsLayout, experts_layouts, replace_experts
from server.checkpoint.experts.module import NF4Experts, StackedWeight
from server.checkpoint.experts.names import TAKEN, is_nf4, is_packed, place_of, router_of
from server.checkpoint.experts.reader import Cut, LayerReader, Names
from server.checkpoint.experts.tensors import CheckpointTensors

logger = logging.getLogger(__name__)


class ExpertsLoader:
    """Takes experts and NF4 routers out of a model before transformers loads it, and loads them afterwards."""

    def __init__(
        self,
        tensors: CheckpointTensors,
        device: torch.device,
        dtype: torch.dtype,
        quantizes: bool,
        cuts: Mapping[str, Cut] | None = None,
    ) -> None:
        """quantizes: whether experts that the checkpoint has in 16 bit become NF4, too; else they stay transformers' own.

        cuts: of a shard, what it has of the experts, by the name of their module.
        """
        self._tensors = tensors
        self._device = device
        self._dtype = dtype
        self._quantizes = quantizes
        self._cuts = cuts or {}
        self._layouts: list[ExpertsLayout] = []
        self._routers: list[tuple[str, dict[str, str], tuple[int, int]]] = []
        self._names: dict[int, Names] = {}
        self._quantized_here = 0
        for name in tensors.names:
            if place := place_of(name):
                own = self._names.setdefault(place.layer, Names())
                (own.biases if place.bias else own.weights)[place.part, place.expert] = name
            elif router := router_of(name):
                self._names.setdefault(router[0], Names()).router[router[1]] = name

    @property
    def taken(self) -> set[str]:
        """The names of the modules of experts that fill() will load."""
        return {layout.name for layout in self._layouts}

    @property
    def names(self) -> tuple[str, ...]:
        """Patterns of the names of tensors that fill() will load."""
        return TAKEN if self._layouts or self._routers else ()

    def take_over(self, model: PreTrainedModel) -> None:
        """Remove from model everything that fill() will load. Raises CheckpointError for NF4 experts of an unknown kind."""
        layouts = list(experts_layouts(model))
        modules = Counter(layout.layer for layout in layouts)
        for layout in layouts:
            names = self._names.get(layout.layer, Names())
            if self._is_unknown(layout, names, modules[layout.layer]):
                logger.warning(
                    "%s: the files' names for its experts are not known: they stay in 16 bit, in 4 times the memory",
                    layout.name,
                )
                continue
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

    def _is_unknown(self, layout: ExpertsLayout, names: Names, modules: int) -> bool:
        """Whether only transformers knows which tensors are a module's: files in 16 bit with other names, or with one set of
        numbers for several modules of a layer."""
        if not self._quantizes or layout.kind == Llama4TextExperts.__name__:
            return False
        return not names.weights or modules > 1

    def _take_router(self, model: nn.Module, layout: ExpertsLayout, names: Names) -> None:
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
        cut, names = self._cuts.get(layout.name), self._names.get(layout.layer, Names())
        if cut is not None:
            layout = replace(layout, inner=cut.whole)
        reader = LayerReader(self._tensors, layout, names, self._device, cut)
        gate_up = StackedWeight(reader.gate_up(), self._to(reader.bias("gate_up")))
        down = StackedWeight(reader.down(), self._to(reader.bias("down")))
        self._quantized_here += reader.quantized
        assert layout.activation is not None
        return NF4Experts(gate_up, down, layout.activation)

    def _to(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        return None if bias is None else bias.to(self._device, self._dtype)

    def _report(self, model: PreTrainedModel) -> None:
        """Log what was found, such as "48 layers of 128 experts in NF4, router in bfloat16"."""
        ours = self.taken
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
