"""Embeddings and output layers of adapters: each slot has a table of its own, from which its sequences' rows come."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from server.checkpoint.base import CheckpointError
from server.checkpoint.host_embedding import HostEmbedding
from server.checkpoint.lora import VocabularyChange
from server.engine.runtime.model.lora import bias_of, dequantized, slots_of_rows
from server.engine.runtime.model.lora_names import AdapterNames


class AdaptedEmbedding(nn.Module):
    """An embedding that takes each token's row from the table of its sequence's adapter."""

    tables: torch.Tensor
    used: torch.Tensor

    def __init__(self, base: nn.Embedding, slots: int) -> None:
        super().__init__()
        self.base = base
        self.scale = getattr(base, "embed_scale", None)
        self.weight = base.weight
        self.register_buffer("tables", base.weight.new_zeros(slots, *base.weight.shape), persistent=False)
        self.register_buffer("used", torch.zeros(slots, dtype=torch.bool, device=base.weight.device), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [..., tokens] to [..., tokens, hidden]."""
        found: torch.Tensor = self.base(ids)
        of_rows = slots_of_rows(ids.numel(), sampled=False)
        if of_rows is None:
            return found
        slots, _ = of_rows
        slot = slots.clamp(min=0)
        own = self.tables[slot, ids.reshape(-1)].view(found.shape)
        if self.scale is not None:
            own = own * self.scale.to(own.dtype)
        mine = (slots >= 0) & self.used[slot]
        return torch.where(mine.view(*ids.shape, 1), own, found)


class AdaptedOutputLayer(nn.Module):
    """An output layer that multiplies each row by the weight of its sequence's adapter."""

    tables: torch.Tensor
    used: torch.Tensor

    def __init__(self, base: nn.Module, example: torch.Tensor, slots: int) -> None:
        super().__init__()
        self.base = base
        self.used_slots: set[int] = set()
        shape = (int(base.out_features), int(base.in_features))  # type: ignore[arg-type]
        self.register_buffer("tables", example.new_zeros(slots, *shape), persistent=False)
        self.register_buffer("used", torch.zeros(slots, dtype=torch.bool, device=example.device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., rows, hidden] to [..., rows, vocabulary]."""
        found: torch.Tensor = self.base(x)
        rows = x.reshape(-1, x.shape[-1])
        of_rows = slots_of_rows(rows.shape[0], sampled=True)
        if of_rows is None:
            return found
        slots, present = of_rows
        out, bias = found.reshape(-1, found.shape[-1]), bias_of(self.base)
        for slot in range(self.tables.shape[0]) if present is None else sorted(present & self.used_slots):
            own = torch.nn.functional.linear(rows, self.tables[slot], bias)
            out = torch.where(((slots == slot) & self.used[slot]).unsqueeze(1), own, out)
        return out.view(found.shape)


class VocabularyTables:
    """Tables of the embedding and the output layer, for models whose adapters at the start change them."""

    def __init__(self, model: PreTrainedModel, names: AdapterNames, targets: Collection[str], slots: int) -> None:
        """targets: names of the modules that get tables."""
        self.tied = bool(model.config.get_text_config().tie_word_embeddings)
        self._names = names
        self.embedding: AdaptedEmbedding | None = None
        self.output_layer: AdaptedOutputLayer | None = None
        embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
        if isinstance(embedding, HostEmbedding) and not {names.embedding, names.output_layer}.isdisjoint(targets):
            raise CheckpointError(
                "engine.embedding_device is cpu, which does not work with adapters that change the embedding or output layer"
            )
        self._dtype, self._shape = embedding.weight.dtype, tuple(embedding.weight.shape)
        if names.embedding in targets:
            self.embedding = AdaptedEmbedding(embedding, slots)
            model.set_submodule(names.embedding, self.embedding)
        if names.output_layer is not None and names.output_layer in targets:
            self.output_layer = AdaptedOutputLayer(output, embedding.weight, slots)
            model.set_submodule(names.output_layer, self.output_layer)

    def check(self, name: str, changes: Mapping[str, VocabularyChange]) -> None:
        """Raise CheckpointError unless the changes are of this model. What they change must have tables."""
        for module, change in changes.items():
            room = self.embedding if module == self._names.embedding else self.output_layer
            if module not in (self._names.embedding, self._names.output_layer) or room is None:
                raise CheckpointError(f"adapter {name!r}: the model has no {module}; it is another base's")
            count, hidden = room.tables.shape[1:]
            for tensor in _whole(change):
                if tuple(tensor.shape) != (count, hidden):
                    raise CheckpointError(
                        f"adapter {name!r}: {module} is {list(tensor.shape)}, the model's {[count, hidden]}: a vocabulary of"
                        " another size is not served; merge the adapter into its base"
                    )
            size = hidden if room is self.embedding else count
            if change.magnitude is not None and change.magnitude.numel() != size:
                raise CheckpointError(
                    f"adapter {name!r}: {module} has {change.magnitude.numel()} magnitudes, it must have {size}"
                )
            if change.rows is not None and not all(0 <= token < count for token in change.rows[0]):
                raise CheckpointError(f"adapter {name!r}: trainable_token_indices has tokens outside the vocabulary")

    @torch.inference_mode()
    def write(self, slot: int, changes: Mapping[str, VocabularyChange]) -> None:
        """Put an adapter's tables into a slot that no sequence uses."""
        embedding = changes.get(self._names.embedding)
        output = changes.get(self._names.output_layer or "")
        if output is None and self.tied and embedding is not None and embedding.rows is not None:
            output = VocabularyChange(rows=embedding.rows)  # PEFT ties trained tokens, too
        if self.embedding is not None:
            _fill(self.embedding, slot, embedding, self.embedding.weight)
        if self.output_layer is not None:
            base = None if output is None or output.weight is not None else self.output_layer.base
            _fill(self.output_layer, slot, output, None if base is None else dequantized(base, self._dtype))


def tables_of(adapter: Mapping[str, object], names: AdapterNames, tied: bool) -> set[str]:
    """Names of the modules that an adapter needs tables for."""
    changes = {name: change for name, change in adapter.items() if isinstance(change, VocabularyChange)}
    embedding = changes.get(names.embedding)
    also = {names.output_layer} if tied and embedding is not None and embedding.rows is not None else set()
    return {*changes, *(name for name in also if name is not None)}


def _whole(change: VocabularyChange) -> list[torch.Tensor]:
    delta = [] if change.delta is None else [change.delta[0][:, :1].expand(-1, change.delta[1].shape[1])]
    return [*([] if change.weight is None else [change.weight]), *delta]


def _fill(
    module: AdaptedEmbedding | AdaptedOutputLayer, slot: int, change: VocabularyChange | None, base: torch.Tensor | None
) -> None:
    module.used[slot] = change is not None
    if isinstance(module, AdaptedOutputLayer):
        module.used_slots = {*module.used_slots, slot} if change is not None else module.used_slots - {slot}
    if change is None:
        return
    table = module.tables[slot]
    weight = base if change.weight is None else change.weight
    assert weight is not None
    table.copy_(weight)
    if change.delta is not None:
        left, right = (factor.to(table.device).float() for factor in change.delta)
        if change.magnitude is None:
            table += (left @ right).to(table.dtype)
        else:
            # PEFT takes these norms by columns of an embedding, which it treats as a transposed layer.
            dim = 0 if isinstance(module, AdaptedEmbedding) else 1
            whole = weight.to(table.device).float() + left @ right
            gain = change.magnitude.to(table.device) / torch.linalg.norm(whole, dim=dim)
            table.copy_(whole * gain.unsqueeze(dim))
    if change.rows is not None:
        table[list(change.rows[0])] = change.rows[1].to(table.device)
