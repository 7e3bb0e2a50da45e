"""Tiny configurations of the multimodal classes."""

from __future__ import annotations

from typing import Any

TEXT: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "head_dim": 16,
}  # fmt: skip
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
