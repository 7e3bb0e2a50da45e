"""Hybrid models, some of whose layers keep a state in the place of keys and values: which are served, and with what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server.checkpoint.base import CheckpointError
from server.config import EngineConfig

STATE_TYPES = frozenset(
    (
        *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"),
        *("lfm2", "lfm2_moe", "lfm2_vl"),
        *("granitemoehybrid", "nemotron_h", "falcon_h1", "bamba"),
    )
)
_BOTH = "hybrid"
"""The kind of layers that attend and keep a state (Falcon-H1)."""
STATE_KINDS = ("linear_attention", "conv", "mamba", _BOTH)
"""The names that configurations have for these layers."""
FEED_FORWARD_KINDS = ("moe", "mlp")
"""Those of layers that keep nothing (Nemotron-H)."""
_MODULES = ("linear_attn", "conv", "mamba", "mixer")
"""The names that transformers' decoder layers have for what keeps the state. A mixer may be something else."""
NARROW_INPUTS = ("in_proj_b", "in_proj_a", "in_proj_ba")
"""Projections in these modules with one or two outputs for each head. They stay in 16 bits: NF4 would save nothing."""


def kinds_of_layers(config: Any) -> list[str]:
    """The kinds of a model's layers by its configuration; empty where that names none."""
    text = config.get_text_config()
    # Where both are there, one is the other's older name.
    named = (getattr(text, key, None) for key in ("layer_types", "layers_block_type"))
    return [str(kind) for kind in next(filter(None, named), ())]


def has_states(config: Any) -> bool:
    """Whether a model that is served has layers with states."""
    return config.model_type in STATE_TYPES and any(kind in STATE_KINDS for kind in kinds_of_layers(config))


def state_modules(model: Any) -> list[Any]:
    """The modules of transformers' decoder layers that keep a state, in the order of the layers; none in other models."""
    if not has_states(model.config):
        return []
    found = [(name, getattr(layer, name, None)) for layer in model.get_decoder().layers for name in _MODULES]
    return [own for name, own in found if own is not None and (name != "mixer" or hasattr(own, "conv1d"))]


def attends(kind: str) -> bool:
    """Whether a layer of a kind that a configuration names has keys and values."""
    return kind == _BOTH or kind not in (*STATE_KINDS, *FEED_FORWARD_KINDS)


def check_hybrid(folder: Path, config: Any, engine: EngineConfig) -> None:
    """Raise CheckpointError for what the engine's options ask of a hybrid model and layers with states do not do.

    config: the configuration of the model in folder.
    """
    if not has_states(config):
        return
    asked = {
        f"engine.speculation {engine.speculation}": engine.speculation not in ("off", "lookup"),
        "engine.batch_invariant": engine.batch_invariant,
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise CheckpointError(
                f"{folder}: {config.model_type} has layers that keep a state of each sequence, which do not work with {what}"
            )
