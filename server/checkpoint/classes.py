"""Which of transformers' classes a checkpoint is loaded into, and what cannot be served at all, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from server.checkpoint.base import CheckpointError
from server.checkpoint.inspection import CheckpointInfo

# The parts of multimodal models that only images and sounds go through, and what leads from them to the text's model.
TOWERS = frozenset(
    (
        "vision_tower", "visual", "vision_model", "vision_encoder", "image_tower", "audio_tower", "audio_model",
        "multi_modal_projector", "mm_projector", "connector", "modality_projection", "embed_vision", "embed_audio",
        "image_newline", "vision_embed_tokens",
    )
)  # fmt: skip
# Layers whose state is no list of keys and values, by what the configuration calls them.
_ATTENTION = ("full_attention", "sliding_attention")


def read_config(folder: Path) -> Any:
    """transformers' configuration of the model in folder. Raises CheckpointError."""
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as e:
        reason = " ".join(str(e).split()) or type(e).__name__
        raise CheckpointError(f"{folder / 'config.json'}: transformers cannot read it: {reason[:300]}") from e


def auto_class(info: CheckpointInfo, config: Any) -> Any:
    """AutoModelForCausalLM, or AutoModelForImageTextToText for a class with towers. Raises CheckpointError."""
    causal = info.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    images = info.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if not causal and not images:
        raise CheckpointError(f"{info.folder}: {info.architecture} ({info.model_type}) is not a causal language model")
    text_only = info.architecture.endswith("ForCausalLM")
    mapping = (
        MODEL_FOR_CAUSAL_LM_MAPPING if causal and (text_only or not images) else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    )
    _refuse_other_states(info, config, mapping[type(config)])
    return AutoModelForCausalLM if mapping is MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def _refuse_other_states(info: CheckpointInfo, config: Any, model_class: type[PreTrainedModel]) -> None:
    """Raise CheckpointError for models that keep more than keys and values: linear attention, state-space layers."""
    text = config.get_text_config()
    kinds = {str(kind) for key in ("layer_types", "layers_block_type") for kind in getattr(text, key, None) or ()}
    others = sorted(kind for kind in kinds if kind not in (*_ATTENTION, "attention"))
    if others or model_class._is_stateful:
        what = f"layers of the kind {', '.join(others)}" if others else "layers with a state of their own"
        raise CheckpointError(
            f"{info.folder}: {info.architecture} ({info.model_type}) has {what}, which the paged cache cannot serve;"
            " only models all of whose layers attend over keys and values are served"
        )


def is_of_tower(name: str) -> bool:
    """Whether a tensor or module of that name belongs to a part that text does not go through."""
    return any(part in TOWERS for part in name.split(".")[:3])


def leave_out_towers(model: nn.Module) -> None:
    """Take the towers out of a model that has no weights yet: only text is served."""
    for name, _ in list(model.named_modules()):
        if name.rpartition(".")[2] in TOWERS and name.count(".") < 3 and is_of_tower(name):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], None)
