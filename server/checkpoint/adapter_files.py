"""Contents of an adapter's files that are read before its tensors: adapter_config.json and a header. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server.checkpoint.base import CheckpointError
from server.checkpoint.inspection import read_header, read_json

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

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
class AdapterConfig:
    """Scales of the modules by adapter_config.json."""

    alpha: float
    rank_stabilized: bool
    alpha_pattern: Mapping[str, float]
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The tokens whose rows were trained (trainable_token_indices), by the last part of the embedding's name."""
    dora: bool = False

    def scale(self, module: str, rank: int) -> float:
        """Factor of B A in this module: alpha / r, or alpha / sqrt(r) when rank-stabilized."""
        matching = (a for key, a in self.alpha_pattern.items() if re.match(rf"(.*\.)?({key})$", module))
        alpha = next(matching, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank


def check_adapter(folder: Path) -> None:
    """Raise CheckpointError for a folder without an adapter, or with one whose configuration is not served."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    read_config(folder)
    read_header(weights_file(folder))


def weights_file(folder: Path) -> Path:
    """The adapter's tensors. Raises CheckpointError where there are none, or in another format."""
    file = folder / WEIGHTS_NAME
    if not file.exists():
        pickled = file.with_suffix(".bin").exists()
        reason = "adapter_model.bin is a pickle, which is not loaded; save as safetensors" if pickled else "missing"
        raise CheckpointError(f"{file}: {reason}")
    return file


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
