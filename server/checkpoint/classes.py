"""Choice of transformers' class for a checkpoint, and refusals, by name, of models that cannot be served at all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.utils import ModelOutput

from server.checkpoint.base import CheckpointError
from server.checkpoint.inspection import CheckpointInfo, read_json
from server.checkpoint.names import TOWERS, is_ignored, is_of_tower
from server.checkpoint.states import (
    FEED_FORWARD_KINDS,
    NARROW_INPUTS,
    STATE_KINDS,
    STATE_TYPES,
    kinds_of_layers,
    state_modules,
)

_LAYER = re.compile(r"\blayers\.(\d+)\.")
# Classes whose towers transformers cannot even build without further packages, so that their text's own class is loaded:
# the class, and how its names differ.
_TEXT_CLASSES = {"gemma3n": {r"^model\.language_model\.": "model.", r"^language_model\.model\.": "model."}}
_TEXT = "model.language_model."
_OTHER_TASK = re.compile(
    r"For(\w+Classification|QuestionAnswering|MultipleChoice|MaskedLM|BlockDiffusion)$|RewardModel$"
)
ATTENTION_KINDS: tuple[str, ...] = ("full_attention", "sliding_attention", "chunked_attention", "attention")
"""The names that configurations have for layers that keep keys and values and nothing else.

Chunked attention is full attention within one chunk, to which the engine limits contexts.
"""


def read_config(folder: Path) -> Any:
    """transformers' configuration of the model in a folder. Raises CheckpointError."""
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as e:
        if "auto_map" in read_json(folder / "config.json"):
            raise CheckpointError(
                f"{folder}: transformers does not have this model type, and code that comes with a checkpoint (auto_map) is"
                " not run"
            ) from e
        reason = " ".join(str(e).split()) or type(e).__name__
        raise CheckpointError(f"{folder / 'config.json'}: transformers cannot read it: {reason[:300]}") from e


@dataclass(frozen=True)
class Loading:
    """The class and configuration with which transformers loads a checkpoint."""

    auto: Any
    """AutoModelForCausalLM, or AutoModelForImageTextToText for a class with towers."""
    config: Any
    """The configuration: config.json's, or its text part."""
    key_mapping: dict[str, str] | None = None
    """Regular expressions of names in the files, and what the class calls the tensors."""


def loading_of(info: CheckpointInfo) -> Loading:
    """The class for a checkpoint. Raises CheckpointError for what cannot be served, by name."""
    if _OTHER_TASK.search(info.architecture):
        raise CheckpointError(
            f"{info.folder}: {info.architecture} generates no text; a causal language model is needed"
        )
    if info.model_type.endswith("_assistant"):
        raise CheckpointError(
            f"{info.folder}: {info.architecture} ({info.model_type}) proposes tokens for a larger model, whose keys"
            " and values it reads; it is no model to serve, and engine.draft_model cannot be it"
        )
    config = read_config(info.folder)
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not causal and not images:
        raise CheckpointError(f"{info.folder}: {info.architecture} ({info.model_type}) is not a causal language model")
    text = config.get_text_config()
    if info.model_type.startswith("gemma4") and text is not config and text.pad_token_id is None:
        raise CheckpointError(
            f"{info.folder / 'config.json'}: text_config has no pad_token_id, which {info.architecture} needs: set it to 0"
        )
    text_only = info.architecture.endswith("ForCausalLM")
    mapping = (
        MODEL_FOR_CAUSAL_LM_MAPPING if causal and (text_only or not images) else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    )
    _refuse_other_states(info, config, mapping[type(config)])
    if info.model_type in _TEXT_CLASSES and not text_only:
        return Loading(AutoModelForCausalLM, config.get_text_config(), _TEXT_CLASSES[info.model_type])
    if mapping is MODEL_FOR_CAUSAL_LM_MAPPING:
        return Loading(AutoModelForCausalLM, config)
    return Loading(AutoModelForImageTextToText, config, _names_of_text(info))


def _names_of_text(info: CheckpointInfo) -> dict[str, str] | None:
    """The names of Gemma 4's class for files that have its text's model elsewhere than in model.language_model.

    None for other files and classes: transformers has rules of its own for older ones.
    """
    if not info.model_type.startswith("gemma4") or any(name.startswith(_TEXT) for name in info.tensors):
        return None
    text = {r"^language_model\.model\.": _TEXT, r"^model\.(?=layers\.|embed_tokens|norm\.|per_layer_)": _TEXT}
    towers = {rf"^{tower}\.": f"model.{tower}." for tower in sorted(TOWERS)}
    return {**text, r"^language_model\.lm_head\.": "lm_head.", **towers}


def _refuse_other_states(info: CheckpointInfo, config: Any, model_class: type[PreTrainedModel]) -> None:
    """Raise CheckpointError for models that keep more than keys and values, and a state that the engine does not know."""
    kinds = set(kinds_of_layers(config))
    known = ATTENTION_KINDS
    if info.model_type in STATE_TYPES:
        known = (*known, *STATE_KINDS, *FEED_FORWARD_KINDS)
    others = sorted(kind for kind in kinds if kind not in known)
    if others or (model_class._is_stateful and not kinds):
        what = f"layers of the kind {', '.join(others)}" if others else "layers with a state of their own"
        raise CheckpointError(
            f"{info.folder}: {info.architecture} ({info.model_type}) has {what}, which the paged cache cannot serve;"
            " docs/models.md says which models with such layers are served"
        )


def is_left_out(name: str, config: Any) -> bool:
    """Whether a tensor of that name in the files is not for text, or proposes later tokens, and so not loaded."""
    layer = _LAYER.search(name)
    return (
        is_ignored(name)
        or is_of_tower(name)
        or (layer is not None and int(layer[1]) in _cross_attention_layers(config))
    )


_Parts = list[tuple[nn.Module, str, nn.Module]]
"""Modules: the one that each belongs to, its name there, itself."""


def _towers_of(model: PreTrainedModel) -> _Parts:
    """The parts that only images and sounds go through."""
    return [
        (parent, name, child)
        for parent_name, parent in model.named_modules()
        if not is_of_tower(parent_name)
        for name, child in parent.named_children()
        if is_of_tower(f"{parent_name}.{name}")
    ]


def towers_aside(model: PreTrainedModel) -> AbstractContextManager[None]:
    """While entered, a model is without the parts that only images and sounds go through."""
    return _aside(_towers_of(model))


def narrow_inputs_aside(model: PreTrainedModel) -> AbstractContextManager[None]:
    """While entered, layers with states are without their projections with one output for each head."""
    modules = state_modules(model)
    return _aside([(m, name, getattr(m, name)) for m in modules for name in NARROW_INPUTS if hasattr(m, name)])


@contextmanager
def _aside(parts: _Parts) -> Iterator[None]:
    for parent, name, _ in parts:
        setattr(parent, name, None)
    try:
        yield
    finally:
        for parent, name, child in parts:
            setattr(parent, name, child)


def leave_out_towers(model: PreTrainedModel) -> None:
    """Take the parts that only images and sounds go through out of a model that has no weights yet: only text is served.

    Layers that attend to images keep their place in the list, so that the others keep their names, as nn.Identity().
    """
    for parent, name, _ in _towers_of(model):
        setattr(parent, name, None)
    crossing = _cross_attention_layers(model.config)
    if crossing:
        layers = model.get_decoder().layers
        for index in crossing:
            layers[index] = nn.Identity()
        attending = [layer for layer in layers if not isinstance(layer, nn.Identity)]
        for index, layer in enumerate(attending):
            layer.self_attn.layer_idx = index
        model.config.get_text_config().num_hidden_layers = len(attending)


def keep_within_tables(model: PreTrainedModel) -> None:
    """Let tokens that a table beside the embedding lacks (Gemma 3n: of images and sounds) have the table's first row.

    transformers does so in newer versions; older ones (5.17) read beyond the table, which on CUDA ends the process.
    """
    decoder = model.get_decoder()
    table = getattr(decoder, "embed_tokens_per_layer", None)
    if isinstance(table, nn.Embedding) and table.num_embeddings < decoder.get_input_embeddings().num_embeddings:
        table.register_forward_pre_hook(lambda own, args: (torch.where(args[0] < own.num_embeddings, args[0], 0),))


def add_image_outputs(model: PreTrainedModel) -> None:
    """Give the output of a text model within a multimodal class image_outputs, None, where it has no such field.

    Llama4ForConditionalGeneration of transformers 5.24.0 reads them from the output of its language_model, whose class
    (that of a causal language model) lacks them, so that every forward fails. In other versions nobody reads them.
    """
    text = getattr(model, "language_model", None)
    # Other classes' text models are without a head, and the output comes from the multimodal class itself.
    if isinstance(text, GenerationMixin):
        text.register_forward_hook(_add_image_outputs)


def _add_image_outputs(_: nn.Module, __: Any, output: Any) -> None:
    if isinstance(output, ModelOutput) and not hasattr(output, "image_outputs"):
        output.image_outputs = None


def _cross_attention_layers(config: Any) -> tuple[int, ...]:
    """Numbers of the layers that attend to images (Mllama), which text does not go through."""
    return tuple(getattr(config.get_text_config(), "cross_attention_layers", None) or ())
