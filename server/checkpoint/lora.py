"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, read and checked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from server.checkpoint.base import CheckpointError
from server.checkpoint.inspection import read_json

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")

# Settings that make an adapter compute something else than base + scale * B(A x), and what they are called.
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "lora_bias": "a bias of the adapter (lora_bias)",
    "modules_to_save": "whole modules (modules_to_save)",
    "trainable_token_indices": "trained token embeddings (trainable_token_indices)",
    "target_parameters": "adapted parameters (target_parameters)",
    "layer_replication": "replicated layers (layer_replication)",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
}
# Initializations that take something out of the base's own weights; the adapter is right beside those only.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_VOCABULARY_MODULES = ("lm_head", "embed_tokens", "wte", "embed_in", "embed_out")


@dataclass(frozen=True)
class AdapterFactors:
    """One module's adapter: y += b @ (a @ x). a [rank, in_features], b [out_features, rank] with the scale in it."""

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        """Inner size."""
        return self.a.shape[0]


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says about the scale of each module."""

    alpha: float
    rank_stabilized: bool
    alpha_pattern: Mapping[str, float]

    def scale(self, module: str, rank: int) -> float:
        """What B A is multiplied by in this module: alpha / r, or alpha / sqrt(r) when rank-stabilized."""
        matching = (a for key, a in self.alpha_pattern.items() if re.match(rf"(.*\.)?({key})$", module))
        alpha = next(matching, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank


def read_adapter(folder: Path, dtype: torch.dtype) -> dict[str, AdapterFactors]:
    """By name of the base model's module, the factors of the adapter in folder, on the CPU in dtype.

    Raises CheckpointError for what is damaged, or is not a plain LoRA of linear layers.
    """
    config = read_config(folder)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in _tensors(folder / WEIGHTS_NAME).items():
        match = _FACTOR.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            kind = "DoRA" if "lora_magnitude_vector" in name else "embeddings" if "lora_embedding" in name else None
            raise CheckpointError(
                f"{folder}: {kind} is not served: {name}" if kind else f"{folder}: not a LoRA weight: {name}"
            )
        _refuse_vocabulary(folder, match["module"])
        found.setdefault(match["module"], {})[match["factor"]] = tensor
    if not found:
        raise CheckpointError(f"{folder / WEIGHTS_NAME}: has no LoRA weights")
    return {module: _factors(folder, module, pair, config, dtype) for module, pair in found.items()}


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
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{file}: trained biases (bias: {config['bias']}) are not served")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{file}: init_lora_weights {start!r} changes the base's weights; save the adapter converted to a plain LoRA"
        )
    targets = config.get("target_modules")
    for target in targets if isinstance(targets, list) else []:
        _refuse_vocabulary(folder, str(target))
    alpha: Any = config.get("lora_alpha")
    pattern = config.get("alpha_pattern") or {}
    if not isinstance(pattern, dict) or not all(_is_number(value) for value in (alpha, *pattern.values())):
        raise CheckpointError(f"{file}: lora_alpha and alpha_pattern must be numbers")
    return AdapterConfig(float(alpha), bool(config.get("use_rslora")), pattern)


def _refuse_vocabulary(folder: Path, module: str) -> None:
    last = module.rsplit(".", 1)[-1]
    if last in _VOCABULARY_MODULES:
        raise CheckpointError(
            f"{folder}: an adapter of {last} is not served; only those of the layers' projections are"
        )


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


def _factors(
    folder: Path, module: str, pair: dict[str, torch.Tensor], config: AdapterConfig, dtype: torch.dtype
) -> AdapterFactors:
    if set(pair) != {"A", "B"}:
        raise CheckpointError(f"{folder}: damaged: {module} has only one of lora_A and lora_B")
    a, b = pair["A"], pair["B"]
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or a.shape[0] == 0:
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        raise CheckpointError(f"{folder}: damaged: {module}: lora_A and lora_B of shapes {shapes} do not fit together")
    if not (a.is_floating_point() and b.is_floating_point() and a.isfinite().all() and b.isfinite().all()):
        raise CheckpointError(f"{folder}: damaged: {module} has weights that are not finite numbers")
    scaled = b.float() * config.scale(module, a.shape[0])
    return AdapterFactors(a.to(dtype), scaled.to(dtype))
