"""Adapters' modules by the names of the model that is served: other versions' prefixes, and projections that are fused."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from server.checkpoint.adapter_files import EMBEDDINGS, OUTPUT_LAYERS
from server.checkpoint.base import CheckpointError
from server.checkpoint.lora import AdapterFactors, AdapterWeights, VocabularyChange
from server.checkpoint.names import is_of_tower
from server.checkpoint.sharding.shards import layer_configs

logger = logging.getLogger(__name__)

# Projections that some classes have joined into one: the joined projection's name, and the others' in the order of its rows.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_PLACE = re.compile(r".*?\b((?:layers|h)\.\d+\..+)")


class AdapterNames:
    """Names that the model has for its projections, its embedding and its output layer."""

    def __init__(self, model: PreTrainedModel, projections: Mapping[str, tuple[int, int]]) -> None:
        """projections: inputs and outputs of each by name."""
        self._projections = projections
        self._by_place = {_place(name): name for name in projections}
        modules = {id(module): name for name, module in model.named_modules()}
        self.embedding: str = modules[id(model.get_input_embeddings())]
        self.output_layer: str | None = modules.get(id(model.get_output_embeddings()))
        text: Any = model.config.get_text_config()
        # Classes whose layers have sizes of their own (Gemma 4) fuse no projections.
        text = layer_configs(text)[0]
        head = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        keys = head * int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        self._sizes = {"qkv_proj": (head * int(text.num_attention_heads), keys, keys)}

    def resolve(self, folder: object, adapter: AdapterWeights) -> dict[str, AdapterFactors | VocabularyChange]:
        """adapter by the model's names. Names that the model does not have stay as they are.

        What belongs to towers is left out: only text is served, which it does not change. Raises CheckpointError.
        """
        found: dict[str, AdapterFactors | VocabularyChange] = {}
        towers = [name for name in adapter if is_of_tower(name)]
        if towers:
            logger.warning("%s: %s and others are for images or sounds, and left out", folder, towers[0])
        for name, change in adapter.items():
            if isinstance(change, VocabularyChange):
                found[self._vocabulary(name)] = change
            elif name not in towers:
                found |= self._split(folder, self._by_place.get(_place(name), name), change)
        return self._joined(folder, found)

    def _vocabulary(self, name: str) -> str:
        last = name.rpartition(".")[2]
        if last in OUTPUT_LAYERS and self.output_layer is not None:
            return self.output_layer
        return self.embedding if last in EMBEDDINGS else name

    def _split(self, folder: object, name: str, factors: AdapterFactors) -> dict[str, AdapterFactors]:
        """An adapter of a projection that the model has in several parts, part by part."""
        parent, _, last = name.rpartition(".")
        parts = [f"{parent}.{part}" for part in _FUSED.get(last, ())]
        places = [self._by_place.get(_place(part), "") for part in parts]
        if not parts or name in self._projections or not all(places):
            return {name: factors}
        sizes = [self._projections[place][1] for place in places]
        if factors.b.shape[0] != sum(sizes):
            raise CheckpointError(f"{folder}: {name} gives {factors.b.shape[0]} features, the model's {sum(sizes)}")

        def split(tensor: torch.Tensor | None) -> list[torch.Tensor | None]:
            return [None] * len(sizes) if tensor is None else list(tensor.split(sizes))

        rest = zip(split(factors.magnitude), split(factors.shift), split(factors.bias), strict=True)
        return {
            place: AdapterFactors(factors.a, b, *others)
            for place, b, others in zip(places, factors.b.split(sizes), rest, strict=True)
        }

    def _joined(
        self, folder: object, adapter: dict[str, AdapterFactors | VocabularyChange]
    ) -> dict[str, AdapterFactors | VocabularyChange]:
        """Join the adapters of projections that the model has as one: the result has the ranks of all of them."""
        found = dict(adapter)
        for name in adapter:
            parent, _, last = name.rpartition(".")
            fused = next((whole for whole, parts in _FUSED.items() if last in parts), None)
            if fused is None or name in self._projections or name not in found:
                continue
            whole = self._by_place.get(_place(f"{parent}.{fused}"))
            if whole is None:
                continue
            parts = [found.pop(f"{parent}.{part}", None) for part in _FUSED[fused]]
            inputs, outputs = self._projections[whole]
            sizes = self._sizes.get(fused, (outputs // 2, outputs // 2))
            found[whole] = _join(folder, whole, parts, sizes, inputs)
        return found


def _join(folder: object, name: str, parts: list[Any], sizes: tuple[int, ...], inputs: int) -> AdapterFactors:
    """Join adapters of several projections (None where one has none) into one, of the projection that has all their rows."""
    given = [part for part in parts if part is not None]
    dtype, rank = given[0].a.dtype, sum(part.rank for part in given)
    a, b = torch.zeros(rank, inputs, dtype=dtype), torch.zeros(sum(sizes), rank, dtype=dtype)
    row = column = 0
    for part, size in zip(parts, sizes, strict=True):
        if part is not None:
            if part.is_affine or part.a.shape[1] != inputs or part.b.shape[0] != size:
                what = "DoRA or a bias of its parts" if part.is_affine else "parts of other sizes"
                raise CheckpointError(f"{folder}: the model has {name} as one projection; {what} cannot be joined")
            a[row : row + part.rank] = part.a
            b[column : column + size, row : row + part.rank] = part.b
            row += part.rank
        column += size
    return AdapterFactors(a, b)


def _place(name: str) -> str:
    """A projection's name from its layer's number on: in front of that, names differ between classes."""
    match = _PLACE.fullmatch(name)
    return name if match is None else match[1]
