"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, read and checked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from server.checkpoint.base import CheckpointError
from server.checkpoint.inspection import read_json

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# The parts of a tensor's name: its module, and which of the module's tensors it is.
_NAME = re.compile(
    r"(?P<module>.+?)\.("
    r"lora_(?P<factor>[AB])\.(?P<part>weight|bias)|lora_embedding_(?P<embedding>[AB])|(?P<magnitude>lora_magnitude_vector)(\.weight)?"
    r"|token_adapter\.(?P<tokens>trainable_tokens_delta)|((base_layer|modules_to_save|original_module)\.)?(?P<whole>weight|bias))"
)

# Settings with which an adapter computes something else than base + scale * B(A x), and their names in messages.
_REFUSED = {
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "target_parameters": "adapted parameters (target_parameters)",
    "layer_replication": "replicated layers (layer_replication)",
}
# Initializations that take something out of the base's weights: the adapter is right only beside the changed weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
EMBEDDINGS = ("embed_tokens", "wte", "embed_in")
OUTPUT_LAYERS = ("lm_head", "embed_out")


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
    """What an adapter makes of the embedding's or the output layer's weight [vocabulary, hidden]."""

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


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says about the scale of each module."""

    alpha: float
    rank_stabilized: bool
    alpha_pattern: Mapping[str, float]
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The tokens whose rows were trained (trainable_token_indices), by the last part of the embedding's name."""
    dora: bool = False

    def scale(self, module: str, rank: int) -> float:
        """What B A is multiplied by in this module: alpha / r, or alpha / sqrt(r) when rank-stabilized."""
        matching = (a for key, a in self.alpha_pattern.items() if re.match(rf"(.*\.)?({key})$", module))
        alpha = next(matching, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank


def read_adapter(folder: Path, dtype: torch.dtype) -> dict[str, AdapterFactors | VocabularyChange]:
    """Read the adapter in folder, on the CPU in dtype, by name of the base model's module.

    Raises CheckpointError for an adapter that is damaged, or is not of a kind that docs/models.md says is served.
    """
    config = read_config(folder)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in _tensors(folder / WEIGHTS_NAME).items():
        match = _NAME.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise CheckpointError(f"{folder}: not a LoRA weight: {name}")
        if not (tensor.is_floating_point() and bool(tensor.isfinite().all())):
            raise CheckpointError(f"{folder}: damaged: {match['module']} has weights that are not finite numbers")
        found.setdefault(match["module"], {})[_kind(match)] = tensor
    if not found:
        raise CheckpointError(f"{folder / WEIGHTS_NAME}: has no LoRA weights")
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


def read_config(folder: Path) -> AdapterConfig:
    """adapter_config.json in folder. Raises CheckpointError, by name, for options that are not served."""
    file = folder / CONFIG_NAME
    config = read_json(file)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{file}: peft_type is {config.get('peft_type')!r}; only LORA is served")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise CheckpointError(f"{file}: task_type is {config['task_type']!r}; only CAUSAL_LM is served")
    for option, name in _REFUSED.items():
        if config.get(option):
            raise CheckpointError(f"{file}: {name} is not served")
    for module in config.get("modules_to_save") or ():
        if module not in (*EMBEDDINGS, *OUTPUT_LAYERS):
            raise CheckpointError(
                f"{file}: a whole {module} (modules_to_save) is not served, only embeddings and output layers are"
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{file}: init_lora_weights {start!r} changes the base's weights; save the adapter converted to a plain LoRA"
        )
    alpha: Any = config.get("lora_alpha")
    pattern = config.get("alpha_pattern") or {}
    if not isinstance(pattern, dict) or not all(_is_number(value) for value in (alpha, *pattern.values())):
        raise CheckpointError(f"{file}: lora_alpha and alpha_pattern must be numbers")
    return AdapterConfig(
        float(alpha),
        bool(config.get("use_rslora")),
        pattern,
        _trained_tokens(file, config),
        bool(config.get("use_dora")),
    )


def _trained_tokens(file: Path, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    given = config.get("trainable_token_indices") or {}
    listed = dict.fromkeys(EMBEDDINGS, given) if isinstance(given, list) else given
    try:
        return {str(name).rpartition(".")[2]: tuple(int(i) for i in ids) for name, ids in listed.items()}
    except (AttributeError, TypeError, ValueError) as e:
        raise CheckpointError(f"{file}: trainable_token_indices must be numbers of tokens") from e


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    if not file.exists():
        pickled = file.with_suffix(".bin").exists()
        reason = "adapter_model.bin is a pickle, which is not loaded; save as safetensors" if pickled else "missing"
        raise CheckpointError(f"{file}: {reason}")
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
