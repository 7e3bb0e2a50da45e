"""Shapes of multimodal models whose images are measured: their configuration, their processor's, and an image's marks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AutoConfig, PreTrainedConfig

_MODELS = Path(__file__).parent / "models"
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class ImageShape:
    """Settings of a multimodal model and of its image processor."""

    model_type: str
    settings: dict[str, Any]
    """Of its configuration."""
    processor: dict[str, Any]
    """preprocessor_config.json."""
    tensors: tuple[str, ...]
    """Tensors of the processor that the tower takes."""
    tokens_of: Callable[[Arrays], int]
    """Tokens of an image, by what the processor gives."""
    marks: tuple[str, str]
    """The configuration's names of the tokens in front of an image and behind it."""

    def config(self, text_layers: int | None) -> PreTrainedConfig:
        """The model's configuration with that many text layers; None: all."""
        settings = copy.deepcopy(self.settings)
        if text_layers is not None:
            settings["text_config"]["num_hidden_layers"] = text_layers
        config: PreTrainedConfig = AutoConfig.for_model(self.model_type, **settings)
        return config


_QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16384,
}  # fmt: skip
_7B: dict[str, Any] = {
    "text_config": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768, "bos_token_id": 151643,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
        "eos_token_id": 151645,
    },
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        "out_hidden_size": 3584,
    },
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
}  # fmt: skip
_TINY: dict[str, Any] = {
    "text_config": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096, "bos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
        "eos_token_id": 2,
    },
    "vision_config": {
        "depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [3],
        "out_hidden_size": 256,
    },
    "image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503,
}  # fmt: skip


def _qwen(settings: dict[str, Any]) -> ImageShape:
    return ImageShape(
        "qwen2_5_vl",
        settings,
        _QWEN_PROCESSOR,
        ("pixel_values", "image_grid_thw"),
        lambda given: int(given["image_grid_thw"].prod()) // 4,
        ("vision_start_token_id", "vision_end_token_id"),
    )


def _gemma_4(soft_tokens: int) -> ImageShape:
    """Gemma-4-26B-A4B; its processor brings every image to that many soft tokens, or a few less."""
    text = json.loads((_MODELS / "gemma-4-26b-a4b" / "config.json").read_text())
    vision = {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "head_dim": 72, "standardize": True,
    }  # fmt: skip
    return ImageShape(
        "gemma4",
        {
            "text_config": {**text, "use_bidirectional_attention": "vision"},
            "vision_config": vision,
            "audio_config": None,
        },
        {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": soft_tokens},
        ("pixel_values", "image_position_ids"),
        lambda given: int(np.sum(given["num_soft_tokens_per_image"])),
        ("boi_token_id", "eoi_token_id"),
    )


SHAPES = {
    "qwen2.5-vl-7b": _qwen(_7B),
    "gemma-4-26b-a4b": _gemma_4(280),
    "gemma-4-26b-a4b-1120": _gemma_4(1120),
    "tiny": _qwen(_TINY),
}
