"""Modules that a checkpoint has in 16 bit and that are loaded in another form, one at a time, behind all others."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn
from transformers import PreTrainedModel

from server.checkpoint.base import CheckpointError, Progress
from server.checkpoint.experts.tensors import BLOCKSIZE, CheckpointTensors
from server.checkpoint.host_embedding import HostEmbedding, check_movable
from server.checkpoint.inspection import CheckpointInfo
from server.checkpoint.parts import EMBEDDING, OUTPUT_LAYER, SKIPPED, in_nf4, part_of
from server.config import EngineConfig

logger = logging.getLogger(__name__)

_FEWEST_ROWS = 64
"""Outputs of a layer that kernels compute in NF4."""


@dataclass(frozen=True)
class Economies:
    """Parts that are loaded in another form than the checkpoint's, to save memory."""

    output_layer: bool = False
    skipped: bool = False
    """Whether projections become NF4 that an NF4 checkpoint has in 16 bit."""
    host_embedding: bool = False

    @classmethod
    def of(cls, config: EngineConfig, device: str) -> Economies:
        """Those that a configuration asks for on a type of device; auto is off."""
        on_host = config.embedding_device == "cpu" and device != "cpu"
        return cls(config.quantize_output_layer == "nf4", config.quantize_skipped, on_host)

    def applied(self, parts: Mapping[str, int], item_bytes: int) -> dict[str, int]:
        """weight_parts() of a checkpoint with what changes here, on the device."""
        found = dict(parts)
        for part, wanted in ((OUTPUT_LAYER, self.output_layer), (SKIPPED, self.skipped)):
            found = in_nf4(found, part, item_bytes) if wanted else found
        return {part: size for part, size in found.items() if part != EMBEDDING or not self.host_embedding}


NO_ECONOMIES = Economies()


class LateLoader:
    """Takes modules out of a model before transformers loads it, and loads them afterwards."""

    def __init__(
        self,
        info: CheckpointInfo,
        tensors: CheckpointTensors,
        device: torch.device,
        dtype: torch.dtype,
        wanted: Economies,
    ) -> None:
        self._info = info
        self._tensors = tensors
        self._device = device
        self._dtype = dtype
        self._wanted = wanted
        self._taken: dict[str, tuple[nn.Linear | nn.Embedding, str]] = {}

    @property
    def names(self) -> list[str]:
        """Patterns of the names of tensors that fill() will load."""
        names = {*self._taken, *(file.removesuffix(".weight") for _, file in self._taken.values())}
        return [rf"^{re.escape(name)}\.(weight|bias)$" for name in names]

    def take_over(self, model: PreTrainedModel, in_model: Mapping[str, str]) -> None:
        """Remove from model what fill() will load. in_model: the model's names of tensors, by their names in the files.

        Raises CheckpointError for an output layer that cannot be quantized, and an embedding that cannot be moved.
        """
        embedding = check_movable(self._info.folder, model) if self._wanted.host_embedding else None
        files = {own: name for name, own in in_model.items()}
        head = model.get_output_embeddings() if self._wanted.output_layer else None
        if self._wanted.output_layer:
            check_untied(self._info.folder, model)
        for name, module in list(model.named_modules()):
            file = files.get(f"{name}.weight")
            if type(module) not in (nn.Linear, nn.Embedding) or file is None:
                continue
            if module in (head, embedding) or self._is_skipped(file, module):
                self._taken[name] = module, file
                placeholder = nn.Module()
                placeholder._is_hf_initialized = True  # type: ignore[assignment]
                model.set_submodule(name, placeholder)

    def _is_skipped(self, file: str, module: nn.Module) -> bool:
        if type(module) is not nn.Linear:
            return False
        wanted = self._wanted.skipped and self._info.quantization == "nf4" and file not in self._info.packed
        return wanted and part_of(file, self._info) == SKIPPED and module.out_features >= _FEWEST_ROWS

    def fill(self, model: PreTrainedModel, progress: Progress) -> None:
        """Load what take_over() took. Raises CheckpointError, by name, for tensors that are missing or do not fit."""
        for done, (name, (module, file)) in enumerate(self._taken.items()):
            progress("quantizing weights", done / len(self._taken))
            late = self._quantized(module, file) if isinstance(module, nn.Linear) else self._on_host(module, file)
            model.set_submodule(name, late)
        if count := sum(isinstance(module, nn.Linear) for module, _ in self._taken.values()):
            logger.info("%d layers that the checkpoint has in 16 bit are quantized to NF4", count)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _on_host(self, module: nn.Embedding, file: str) -> HostEmbedding:
        weight = self._tensors.read_float(file, tuple(module.weight.shape)).to(self._dtype, copy=True)
        if not weight.sum(dtype=torch.float32).isfinite():
            raise self._tensors.error(file, "has values that are not finite numbers")
        logger.info("the embedding stays in host memory, %.2f GiB", weight.nbytes / 2**30)
        return HostEmbedding(weight)

    def _quantized(self, module: nn.Linear, file: str) -> Linear4bit:
        n, k = module.out_features, module.in_features
        with torch.device("meta"):
            layer = Linear4bit(k, n, module.bias is not None, self._dtype, quant_type="nf4")
        weight = self._tensors.read_float(file, (n, k)).to(self._device, self._dtype)
        layer.weight = Params4bit(
            weight, requires_grad=False, quant_type="nf4", blocksize=BLOCKSIZE, compress_statistics=True, module=layer
        ).to(self._device)
        if module.bias is not None:
            bias = self._tensors.read_float(file.removesuffix("weight") + "bias", (n,))
            layer.bias = nn.Parameter(bias.to(self._device, self._dtype), requires_grad=False)
        return layer


def check_untied(folder: Path, model: PreTrainedModel) -> None:
    """Raise CheckpointError for a model whose output layer is the embedding, too, or no plain linear layer."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or model.config.get_text_config().tie_word_embeddings:
        raise CheckpointError(
            f"{folder}: engine.quantize_output_layer is nf4, but the output layer is the embedding, which stays in 16 bit"
        )
