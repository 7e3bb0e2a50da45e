"""Load one shard of a checkpoint: of every weight only the shard's rows or columns, by the rules of shards.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from bitsandbytes.functional import quantize_4bit
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from server.checkpoint.base import CheckpointError, Progress
from server.checkpoint.classes import add_image_outputs
from server.checkpoint.diagnosis import check_finite, end_tokens, first_line
from server.checkpoint.experts.tensors import BLOCKSIZE
from server.checkpoint.loading import check_memory
from server.checkpoint.sharding.multimodal import initialize_buffers
from server.checkpoint.sharding.plan import ShardPlan, plan_shard
from server.checkpoint.sharding.shards import Part, Shard
from server.checkpoint.sharding.slices import cut_linear
from server.checkpoint.sharding.stored import StoredTensors
from server.checkpoint.sharding.vocabulary import set_vocabulary, shares_embedding, vocabulary_rows
from server.checkpoint.states import NARROW_INPUTS


@dataclass(frozen=True)
class ShardedModel:
    """A shard as a transformers model, and what it has of every linear layer, by the layer's name.

    Its embeddings and output layer have the rows Shard.rows_of(the vocabulary).
    """

    model: PreTrainedModel
    parts: dict[str, Part]
    shard: Shard
    norms: tuple[str, ...] = ()
    """The names of norms over all heads."""


def load_shard(
    folder: Path, device: torch.device, dtype: torch.dtype, progress: Progress, shard: Shard, towers: bool = False
) -> ShardedModel:
    """The shard of the model in folder, in eval mode on device: as load_model() loads the whole of it.

    towers: whether the parts that only images go through are loaded, whole. Raises CheckpointError for what load_model()
    does, and for a model that cannot be divided so.
    """
    plan = plan_shard(folder, device, dtype, shard, towers)
    check_memory(folder, device, plan.num_bytes, shard.count)
    model = plan.empty.model
    try:
        stored = StoredTensors(folder, {own: name for name, own in plan.names.items()})
        _Filling(plan, stored, device, dtype).run(progress)
        plan.experts.fill(model, progress)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (OSError, SafetensorError, RuntimeError) as e:
        raise CheckpointError(f"{folder}: cannot be loaded: {first_line(e)}") from e
    if (ends := end_tokens(folder)) is not None:
        model.generation_config = ends
    check_finite(folder, model)
    add_image_outputs(model)
    return ShardedModel(model.eval().requires_grad_(False), plan.empty.parts, plan.shard, plan.empty.norms)


class _Filling:
    """Puts a shard's tensors into a model that is on the meta device."""

    def __init__(self, plan: ShardPlan, stored: StoredTensors, device: torch.device, dtype: torch.dtype) -> None:
        self._model = plan.empty.model
        self._stored = stored
        self._info = plan.info
        self._device = device
        self._dtype = dtype
        self._shard = plan.shard
        self._parts = plan.empty.parts
        self._split = plan.empty.rows
        self._narrow = {name for name in self._parts if name.rpartition(".")[2] in NARROW_INPUTS}

    def run(self, progress: Progress) -> None:
        """Fill all modules."""
        model, stage = self._model, "loading weights"
        if self._info.quantization == "none":
            stage = "loading and quantizing weights"
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        tied = shares_embedding(model, self._info.folder)
        modules = list(model.named_modules())
        for done, (name, module) in enumerate(modules):
            if done % 32 == 0:
                progress(stage, done / len(modules))
            if module is embeddings or module is head:
                self._fill_vocabulary(name, module, embeddings.weight if tied and module is head else None)
            elif name in self._parts:
                model.set_submodule(name, self._linear(name, module, self._parts[name]))
            elif type(module) is nn.Linear and self._stored.is_packed(f"{name}.weight"):
                model.set_submodule(name, self._linear(name, module, Part.of_whole(module)))
            else:
                self._fill_plain(name, module)
        progress(stage, 1.0)

    def _fill_vocabulary(self, name: str, module: nn.Module, tied: torch.Tensor | None) -> None:
        """tied: the embedding's rows, where the class has them in this layer, too, unless the files have others."""
        bias = getattr(module, "bias", None)
        shape: torch.Size = module.weight.shape  # type: ignore[assignment]
        if any(True for _ in module.buffers(recurse=False)):
            # One row, so that nothing is filled with random numbers.
            set_vocabulary(module, module.weight[:1])  # type: ignore[index]
            initialize_buffers(self._model, module, self._device)
        padded = None if bias is None else self._rows(f"{name}.bias", shape[:1])
        weight = tied
        if tied is None or f"{name}.weight" in self._stored:
            weight = self._rows(f"{name}.weight", shape)
            if tied is not None and torch.equal(weight, tied):
                weight = tied
        assert weight is not None
        set_vocabulary(module, weight, padded)

    def _rows(self, name: str, shape: torch.Size) -> torch.Tensor:
        """The shard's rows of a tensor of that shape."""
        values, state = self._stored[name], self._stored.quant_state(name)
        self._check_shape(name, values.shape if state is None else state.shape, shape)
        return vocabulary_rows(values, state, self._shard, self._dtype, self._device)

    def _check_shape(self, name: str, found: Sequence[int], expected: Sequence[int]) -> None:
        if tuple(found) != tuple(expected):
            raise CheckpointError(f"{self._info.folder}: damaged: {name} has shape {list(found)}, not {list(expected)}")

    def _fill_plain(self, name: str, module: nn.Module) -> None:
        parameters = dict(module.named_parameters(recurse=False))
        buffers = dict(module.named_buffers(recurse=False))
        prefix = f"{name}." if name else ""
        if any(prefix + key not in self._stored for key in buffers):
            initialize_buffers(self._model, module, self._device)
        for key, value in {**parameters, **buffers}.items():
            full = prefix + key
            if key in buffers and full not in self._stored:
                continue
            stored = self._stored[full]
            if full in self._split:
                stored = torch.cat([stored[rows.start : rows.stop] for rows in self._split[full]])
            self._check_shape(full, stored.shape, value.shape)
            # Numbers that correct a router's scores are in float32, as in the whole model.
            kept = key in buffers and key in (self._model._keep_in_fp32_modules_strict or ())
            dtype = torch.float32 if kept else self._dtype if stored.is_floating_point() else None
            filled = stored.to(self._device, dtype, copy=True)
            if key in parameters:
                setattr(module, key, nn.Parameter(filled, requires_grad=False))
            else:
                module.register_buffer(key, filled)

    def _linear(self, name: str, module: nn.Module, part: Part) -> nn.Module:
        """The layer's part: NF4 where the checkpoint is, or where it is not quantized at all."""
        stored, weight = self._stored, f"{name}.weight"
        bias = self._bias(name, module, part)
        state, values = stored.quant_state(weight), stored[weight]
        if state is None and self._info.quantization == "none" and name not in self._narrow:
            # The scale of the scales spans the whole weight, which therefore is quantized as a whole.
            values, state = quantize_4bit(
                values.to(self._device, self._dtype).contiguous(), blocksize=BLOCKSIZE, compress_statistics=True,
                quant_type="nf4", quant_storage=torch.uint8,
            )  # fmt: skip
        if state is not None:
            try:
                return cut_linear(values, state, part, bias, self._dtype, self._device)
            except ValueError as e:
                raise CheckpointError(
                    f"{self._info.folder}: engine.tensor_parallel_size {self._shard.count}: {name}: {e}"
                ) from e
        self._check_shape(weight, values.shape, part.whole)
        own = part.rows_of(part.columns_of(values))
        plain = nn.Linear(part.shape[1], part.shape[0], bias=bias is not None, device="meta")
        plain.weight = nn.Parameter(own.to(self._device, self._dtype), requires_grad=False)
        if bias is not None:
            plain.bias = nn.Parameter(bias.to(self._device, self._dtype), requires_grad=False)
        return plain

    def _bias(self, name: str, module: nn.Module, part: Part) -> torch.Tensor | None:
        """The shard's bias; the first shard's where the outputs of all are added up."""
        if getattr(module, "bias", None) is None or (part.is_partial and self._shard.rank):
            return None
        return part.rows_of(self._stored[f"{name}.bias"])
