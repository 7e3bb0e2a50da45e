"""Tiny configurations of the multimodal classes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from tests.checkpoint.families import COMMON
from tests.checkpoint.layouts import Tensors

TEXT = COMMON
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_QWEN_VISION = {"depth": 1, "num_heads": 2, "intermediate_size": 32, "patch_size": 14}
_M_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_TOKENS = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
_ALTERNATING = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "sliding_window": 12,
}
_PER_LAYER = {"vocab_size_per_layer_input": 120, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2}

GEMMA_3N_TEXT: dict[str, Any] = {
    **TEXT, **_ALTERNATING, **_PER_LAYER, "laurel_rank": 8, "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "vocab_size_per_layer_input": 128,
}  # fmt: skip
"""The text of Gemma 3n, whose towers transformers makes with timm only."""
CLASSES: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **TEXT}, "vision_config": {"model_type": "clip_vision_model", **VISION},
    },
    "llava_next": {
        "text_config": {"model_type": "mistral", **TEXT}, "vision_config": {"model_type": "clip_vision_model", **VISION},
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **TEXT},
        "vision_config": {"model_type": "pixtral", "head_dim": 16, **VISION},
    },
    "qwen2_vl": {
        "text_config": {**TEXT, "rope_parameters": _M_ROPE},
        "vision_config": {**_QWEN_VISION, "embed_dim": 32, "hidden_size": 64}, **_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": _M_ROPE},
        "vision_config": {**_QWEN_VISION, "hidden_size": 32, "out_hidden_size": 64, "fullatt_block_indexes": [0]}, **_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "rope_parameters": _M_ROPE},
        "vision_config": {**_QWEN_VISION, "hidden_size": 32, "out_hidden_size": 64, "deepstack_visual_indexes": [0],
                          "num_position_embeddings": 16},
        **_TOKENS,
    },
    "idefics3": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": VISION, "image_token_id": 120},
    "smolvlm": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": VISION, "image_token_id": 120},
    "gemma3": {"text_config": {**TEXT, **_ALTERNATING}, "vision_config": VISION, "mm_tokens_per_image": 4},
    "gemma4": {
        "text_config": {**TEXT, **_ALTERNATING, **_PER_LAYER, "per_layer_config": {"01": {"head_dim": 32},
                                                                                  "03": {"head_dim": 32}}},
        "vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16},
        "audio_config": None,
    },
    # Without experts, of which the tests of mixtures have all.
    "llama4": {
        "text_config": {**TEXT, "intermediate_size_mlp": 96, "moe_layers": [], "num_local_experts": 2,
                        "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "attention_chunk_size": 64},
        "vision_config": {**VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    },
    "mllama": {
        "text_config": {**TEXT, "num_hidden_layers": 4, "cross_attention_layers": [1, 3], "rope_parameters":
                        {"rope_type": "default", "rope_theta": 10000.0}},
        "vision_config": {**VISION, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
                          "vision_output_dim": 64, "intermediate_layers_indices": [0],
                          "supported_aspect_ratios": [[1, 1]], "max_num_tiles": 1},
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**VISION, "image_size": [28, 28], "patch_size": [14, 14]}, "image_token_id": 120,
    },
    "aya_vision": {
        "text_config": {"model_type": "cohere2", **TEXT, **_ALTERNATING},
        "vision_config": {"model_type": "siglip_vision_model", **VISION}, "image_token_id": 120,
    },
}  # fmt: skip

# As transformers 4.x has saved them, and still does for some classes.
LLAVA_NAMES = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)
QWEN_NAMES = (("model.language_model.", "model."), ("model.visual.", "visual."))
NEW_NAMES = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)


def renamed(*changes: tuple[str, str]) -> Callable[[Tensors], Tensors]:
    """Tensors under other names: of each the first prefix that it has is changed."""

    def change(tensors: Tensors) -> Tensors:
        found = {}
        for name, tensor in tensors.items():
            old, new = next(((old, new) for old, new in changes if name.startswith(old)), ("", ""))
            found[new + name.removeprefix(old)] = tensor
        return found

    return change


def divisible(model_type: str) -> dict[str, Any]:
    """Settings of a class whose text model can be divided among two and four ranks."""
    settings = copy.deepcopy(CLASSES[model_type])
    text, vision = settings["text_config"], settings["vision_config"]
    text |= {"intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
    if "rope_parameters" in text and model_type.startswith("qwen"):
        text["rope_parameters"] = {**_M_ROPE, "mrope_section": [4, 6, 6]}
    if model_type in ("qwen2_vl", "qwen2_5_vl", "mllama"):  # their heads divide the hidden size
        text["hidden_size"] = vision["hidden_size" if model_type == "qwen2_vl" else "out_hidden_size"] = 256
    if model_type == "gemma4":
        text |= {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "num_key_value_heads": 4}
        text["per_layer_config"] = {layer: {"head_dim": 64, "num_key_value_heads": 2} for layer in ("01", "03")}
    return settings
