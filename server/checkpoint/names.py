"""Parts of a model by the names of a checkpoint's tensors and modules; without torch."""

from __future__ import annotations

# The parts of multimodal models that only images and sounds go through, and what leads from them to the text's model.
TOWERS = frozenset(
    (
        "vision_tower", "visual", "vision_model", "vision_encoder", "image_tower", "audio_tower", "audio_model",
        "multi_modal_projector", "mm_projector", "connector", "modality_projection", "embed_vision", "embed_audio",
        "image_newline", "vision_embed_tokens", "vision_adapter", "vision_projection",
        "vision_embedder",
    )
)  # fmt: skip


def is_ignored(name: str) -> bool:
    """Whether a tensor of that name is never loaded: heads that predict several tokens (Qwen3.5's mtp)."""
    return name.startswith("mtp.")


def is_of_tower(name: str) -> bool:
    """Whether a tensor or module of that name belongs to a part that text does not go through."""
    return any(part in TOWERS for part in name.split(".")[:3])
