"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, read and checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from server.checkpoint.adapter_files import (
    EMBEDDINGS,
    OUTPUT_LAYERS,
    WEIGHTS_NAME,
    AdapterConfig,
    read_config,
    weights_file,
)
from server.checkpoint.base import CheckpointError

_PREFIX = "base_model.model."
# The parts of a tensor's name: its module, and which of the module's tensors it is.
_NAME = re.compile(
    r"(?P<module>.+?)\.("
    r"lora_(?P<factor>[AB])\.(?P<part>weight|bias)|lora_embedding_(?P<embedding>[AB])|(?P<magnitude>lora_magnitude_vector)(\.weight)?"
    r"|token_adapter\.(?P<tokens>trainable_tokens_delta)|((base_layer|modules_to_save|original_module)\.)?(?P<whole>weight|bias))"
)


@dataclass(frozen=True)
class AdapterFactors:
    """One linear layer's adapter: y = gain * (W x + b @ (a @ x) + shift) + bias.

    a [rank, in_features] and b [out_features, rank] with the scale in it; rank 0 where only a bias was trained. With a
    magnitude the gain is magnitude / |W + b a| by row (DoRA).
    """

    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None = None
    """float32 [out_features]; None: the gain is 1."""
    shift: torch.Tensor | None = None
    """float32 [out_features]: the bias of lora_B with the scale in it."""
    bias: torch.Tensor | None = None
    """float32 [out_features]: takes the place of the layer's own."""

    @property
    def rank(self) -> int:
        """Inner size."""
        return self.a.shape[0]

    @property
    def is_affine(self) -> bool:
        """Whether it is more than the two factors."""
        return any(tensor is not None for tensor in (self.magnitude, self.shift, self.bias))


@dataclass(frozen=True)
class VocabularyChange:
    """Change that an adapter makes to the embedding's or the output layer's weight [vocabulary, hidden]."""

    weight: torch.Tensor | None = None
    """Takes the place of the base's."""
    delta: tuple[torch.Tensor, torch.Tensor] | None = None
    """left [vocabulary, rank] and right [rank, hidden], whose product is added to the weight."""
    magnitude: torch.Tensor | None = None
    """float32, for DoRA: the norms that the weight with delta is scaled to.

    [hidden] for the embedding's columns, [vocabulary] for the output layer's rows.
    """
    rows: tuple[tuple[int, ...], torch.Tensor] | None = None
    """Tokens, and their rows [tokens, hidden], which take the place of the weight's."""


AdapterWeights = Mapping[str, AdapterFactors | VocabularyChange]
"""An adapter: what it makes of each module, by the module's name in the base model."""


def read_adapter(folder: Path, dtype: torch.dtype) -> dict[str, AdapterFactors | VocabularyChange]:
    """Read the adapter in folder, on the CPU in dtype, by name of the base model's module.

    Raises CheckpointError for an adapter that is damaged, or is not of a kind that docs/models.md says is served.
    """
    config = read_config(folder)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in _tensors(weights_file(folder)).items():
        match = _NAME.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise CheckpointError(f"{folder}: not a LoRA weight: {name}")
        if not (tensor.is_floating_point() and bool(tensor.isfinite().all())):
            raise CheckpointError(f"{folder}: damaged: {match['module']} has weights that are not finite numbers")
        found.setdefault(match["module"], {})[_kind(match)] = tensor
    if not found:
        raise CheckpointError(f"{folder / WEIGHTS_NAME}: has no LoRA weights")
    if expert := next((module for module in found if ".experts." in module), None):
        raise CheckpointError(
            f"{folder}: adapters of experts are not served: {expert}; merge the adapter into its base"
        )
    return {
        module: _vocabulary_change(folder, module, parts, config, dtype)
        if module.rpartition(".")[2] in (*EMBEDDINGS, *OUTPUT_LAYERS)
        else _factors(folder, module, parts, config, dtype)
        for module, parts in found.items()
    }


def check_divisible(name: str, weights: Mapping[str, AdapterFactors | VocabularyChange]) -> None:
    """Raise CheckpointError for an adapter that several GPUs do not serve."""
    if any(isinstance(change, VocabularyChange) or change.is_affine for change in weights.values()):
        raise CheckpointError(
            f"adapter {name!r}: DoRA, trained biases, embeddings and output layers work on one GPU only"
            " (engine.tensor_parallel_size: 1)"
        )


def _kind(match: re.Match[str]) -> str:
    """The kind of a tensor within its module: A, B, B.bias, magnitude, tokens, weight or bias."""
    if match["factor"] or match["embedding"]:
        return f"{match['factor'] or match['embedding']}{'.bias' if match['part'] == 'bias' else ''}"
    return "magnitude" if match["magnitude"] else "tokens" if match["tokens"] else str(match["whole"])


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt") as stream:
            return {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 - it is no dict
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{file}: damaged: {' '.join(str(e).split())}") from e


def _pair(folder: Path, module: str, parts: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """lora_A [rank, inputs] and lora_B [outputs, rank]."""
    if ("A" in parts) != ("B" in parts):
        raise CheckpointError(f"{folder}: damaged: {module} has only one of lora_A and lora_B")
    a, b = parts["A"], parts["B"]
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or a.shape[0] == 0:
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        raise CheckpointError(f"{folder}: damaged: {module}: lora_A and lora_B of shapes {shapes} do not fit together")
    return a, b


def _check_magnitude(folder: Path, module: str, parts: Mapping[str, torch.Tensor], config: AdapterConfig) -> None:
    if config.dora != ("magnitude" in parts):
        raise CheckpointError(
            f"{folder}: damaged: use_dora is {config.dora}, and {module} has {'no' if config.dora else 'a'}"
            " lora_magnitude_vector"
        )


def _factors(
    folder: Path, module: str, parts: Mapping[str, torch.Tensor], config: AdapterConfig, dtype: torch.dtype
) -> AdapterFactors:
    if "weight" in parts or "tokens" in parts:
        raise CheckpointError(f"{folder}: a whole {module} is not served, only embeddings and output layers are")
    if "A" not in parts and "B" not in parts:
        if set(parts) != {"bias"}:
            raise CheckpointError(f"{folder}: damaged: {module} has neither lora_A nor lora_B")
        nothing = torch.empty(0, 0, dtype=dtype)
        return AdapterFactors(nothing, nothing, bias=parts["bias"].float())
    a, b = _pair(folder, module, parts)
    _check_magnitude(folder, module, parts, config)
    scale = config.scale(module, a.shape[0])
    rest = {key: parts[key].float().reshape(-1) for key in ("magnitude", "B.bias", "bias") if key in parts}
    if any(tensor.numel() != b.shape[0] for tensor in rest.values()):
        raise CheckpointError(f"{folder}: damaged: {module} has {', '.join(rest)} of another size than lora_B")
    shift = rest["B.bias"] * scale if "B.bias" in rest else None
    return AdapterFactors(a.to(dtype), (b.float() * scale).to(dtype), rest.get("magnitude"), shift, rest.get("bias"))


def _vocabulary_change(
    folder: Path, module: str, parts: Mapping[str, torch.Tensor], config: AdapterConfig, dtype: torch.dtype
) -> VocabularyChange:
    last = module.rpartition(".")[2]
    if set(parts) & {"bias", "B.bias"}:
        raise CheckpointError(f"{folder}: a trained bias of {module} is not served")
    if "A" in parts:
        _check_magnitude(folder, module, parts, config)
    delta = rows = None
    if "A" in parts or "B" in parts:
        a, b = _pair(folder, module, parts)
        b = (b.float() * config.scale(module, a.shape[0])).to(dtype)
        delta = (a.T.to(dtype), b.T) if last in EMBEDDINGS else (b, a.to(dtype))
    if "tokens" in parts:
        tokens = config.tokens.get(last, ())
        if len(tokens) != parts["tokens"].shape[0]:
            raise CheckpointError(
                f"{folder}: damaged: {module} has {parts['tokens'].shape[0]} trained tokens,"
                f" trainable_token_indices names {len(tokens)}"
            )
        rows = (tokens, parts["tokens"].to(dtype))
    weight = parts.get("weight")
    magnitude = parts["magnitude"].float().reshape(-1) if "magnitude" in parts and delta is not None else None
    return VocabularyChange(None if weight is None else weight.to(dtype), delta, magnitude, rows)
