"""Whether a checkpoint is an embedding model, and how: sentence-transformers' files in its folder (ADR 25)."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.checkpoint.base import CheckpointError
from server.checkpoint.inspection import read_json
from server.config import EngineConfig

logger = logging.getLogger(__name__)

MODULES = "modules.json"
_LAST_TOKEN = "lasttoken"
_SERVED = {"Transformer", "Pooling", "Normalize"}


@dataclass(frozen=True)
class EmbeddingModel:
    """Way from the final hidden state of a text's last token to its embedding."""

    size: int
    normalize: bool = True
    prefix: str = ""
    """Text in front of every input: the prompt that the model's makers set as the default."""


def embedding_kind(folder: Path, config: EngineConfig) -> EmbeddingModel | str:
    """Read how the model in a folder gives embeddings, or why it gives none, as engine.embeddings asks for.

    Raises CheckpointError where they are asked for and not served.
    """
    if config.embeddings is False:
        return "engine.embeddings is false"
    if config.batch_invariant:
        return "engine.batch_invariant is on, which they do not keep to"
    try:
        found = read_embedding_model(folder)
    except CheckpointError as e:
        if config.embeddings:
            raise
        logger.warning("/v1/embeddings is off: %s", e)
        return str(e)
    if found is not None or not config.embeddings:
        return found or (
            f"the model is no embedding model (it has no {MODULES}); engine.embeddings: true gives the final hidden state"
            " of the last token all the same"
        )
    return EmbeddingModel(hidden_size(folder))


def read_embedding_model(folder: Path) -> EmbeddingModel | None:
    """The embedding model that modules.json describes; None where the folder has no such file.

    Raises CheckpointError for a pooling or a module that is not computed here.
    """
    path = folder / MODULES
    if not path.exists():
        return None
    modules = _read_list(path)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    for kind in kinds:
        if kind not in _SERVED:
            raise CheckpointError(f"{path}: a {kind or 'nameless'} layer after the model is not served")
    for module, kind in zip(modules, kinds, strict=True):
        if kind == "Pooling":
            _check_pooling(folder / str(module.get("path", "")) / "config.json")
    config = read_json(folder / "config.json")
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise CheckpointError(f"{folder}: its tokens attend to later ones, too; only causal attention is served")
    return EmbeddingModel(hidden_size(folder), "Normalize" in kinds, _default_prompt(folder))


def hidden_size(folder: Path) -> int:
    """The number of elements of a hidden state of the model in a folder. Raises CheckpointError."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("hidden_size")
    if not isinstance(size, int):
        raise CheckpointError(f"{folder / 'config.json'}: has no hidden_size")
    return size


def _check_pooling(path: Path) -> None:
    """CheckpointError unless the last token's state is the embedding."""
    config = read_json(path)
    named = config.get("pooling_mode")
    if isinstance(named, str):
        modes = {named}
    else:
        modes = {name.removeprefix("pooling_mode_") for name, on in config.items() if on is True and "mode_" in name}
    if modes != {_LAST_TOKEN}:
        raise CheckpointError(
            f"{path}: pools by {' and '.join(sorted(modes)) or 'nothing'}; only the last token's state is served"
        )


def _default_prompt(folder: Path) -> str:
    path = folder / "config_sentence_transformers.json"
    if not path.exists():
        return ""
    config = read_json(path)
    name, prompts = config.get("default_prompt_name"), config.get("prompts")
    return str(prompts.get(name, "")) if isinstance(prompts, dict) and name is not None else ""


def _read_list(path: Path) -> list[dict[str, Any]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path}: damaged: {e}") from e
    if not isinstance(value, list) or not all(isinstance(module, dict) for module in value):
        raise CheckpointError(f"{path}: damaged: not a list of modules")
    return value
