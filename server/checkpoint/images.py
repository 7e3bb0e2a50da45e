"""Whether prompts for a checkpoint may have images, and what its files say about images. Imports no torch (ADR 28)."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any, Literal

from server.checkpoint.base import CheckpointError
from server.checkpoint.inspection import inspect_checkpoint, read_json
from server.checkpoint.names import is_of_tower
from server.config import EngineConfig

logger = logging.getLogger(__name__)

IMAGE_TYPES = frozenset(
    (
        "aya_vision", "gemma3", "gemma4", "gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "idefics3", "internvl",
        "lfm2_vl", "llava", "llava_next", "mistral3", "muse_glimmer", "muse_spark", "qwen2_5_vl", "qwen2_vl", "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl", "qwen3_vl_moe", "smolvlm",
    )
)  # fmt: skip
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


WholeImages = Literal["windows", "all", "all, past windows"]


def whole_images(config: Any) -> WholeImages | None:
    """The layers in which an image's tokens attend to one another in both directions; windows: those with a window.

    A layer's window bounds what they see of one another, too, unless this says "past windows".
    config: config.json's content, or transformers' configuration.
    """
    model_type = _field(config, "model_type")
    if model_type == "gemma3":
        return "all"
    given = _field(_field(config, "text_config"), "use_bidirectional_attention")
    # As their classes' forwards do it.
    kinds: dict[str, WholeImages] = {"gemma4": "windows", "gemma4_unified": "all, past windows"}
    return kinds.get(str(model_type)) if given == "vision" else None


def _field(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def without_images(folder: Path, config: EngineConfig) -> str | None:
    """Why prompts of the model in a folder may have no images; None where they may.

    Raises CheckpointError where engine.images asks for them in vain.
    """
    reason = _reason(folder, config)
    if reason is not None and config.images:
        raise CheckpointError(f"{folder}: engine.images is true, but {reason}")
    if reason is not None and read_json(folder / "config.json").get("model_type") in IMAGE_TYPES:
        logger.info("%s: prompts may have no images: %s", folder.name, reason)
    return reason


def _reason(folder: Path, config: EngineConfig) -> str | None:
    if config.images is False:
        return "engine.images is false"
    settings = read_json(folder / "config.json")
    model_type, architecture = settings.get("model_type"), (settings.get("architectures") or ["?"])[0]
    if model_type not in IMAGE_TYPES or str(architecture).endswith("ForCausalLM"):
        return f"{architecture} ({model_type}) is served with text only"
    if config.batch_invariant:
        return "engine.batch_invariant is on, which prompts with images do not keep to"
    if whole_images(settings) is not None and config.kv_cache_dtype != "auto":
        return f"images of {model_type} need engine.kv_cache_dtype auto, not {config.kv_cache_dtype}"
    if config.load_format == "dummy":
        return "engine.load_format is dummy, which makes no weights of image towers"
    if importlib.util.find_spec("PIL") is None:
        return "Pillow is not installed (pip install pillow)"
    if not any((folder / name).exists() for name in PROCESSOR_FILES):
        return f"the checkpoint does not say how images are prepared (it has no {PROCESSOR_FILES[0]})"
    if not any(is_of_tower(name) for name in inspect_checkpoint(folder).tensors):
        return "the checkpoint has no weights of an image tower"
    return None


def image_token_id(folder: Path) -> int:
    """The token that stands in a prompt for a row of an image's features, by config.json. Raises CheckpointError."""
    settings = read_json(folder / "config.json")
    found = settings.get("image_token_id", settings.get("image_token_index"))
    if not isinstance(found, int):
        raise CheckpointError(f"{folder / 'config.json'}: it has no image_token_id")
    return found
