"""Tiny configurations of families that few people serve, each with what a server says of it."""

from __future__ import annotations

from typing import Any

from tests.checkpoint.families import COMMON
from tests.checkpoint.multimodal import TEXT, VISION

Settings = dict[str, Any]

# With a position in front of the first one; they generate if they are decoders.
_ROBERTA: Settings = {**COMMON, "is_decoder": True, "pad_token_id": 1}
_DECODER: Settings = {
    "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_layers": 2,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "vocab_size": 128, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "forced_eos_token_id": None, "decoder_start_token_id": 1,
}  # fmt: skip
_AUDIO: Settings = {
    "d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "encoder_layers": 1, "num_mel_bins": 16,
    "output_dim": 64, "n_window": 10, "max_source_positions": 64, "downsample_hidden_size": 16,
}  # fmt: skip
_OMNI: Settings = {
    "audio_token_index": 118, "audio_token_id": 118, "image_token_index": 120, "image_token_id": 120,
    "video_token_index": 121, "video_token_id": 121, "audio_start_token_id": 116, "audio_end_token_id": 117,
    "user_token_id": 115, "audio_config": _AUDIO,
}  # fmt: skip
_M_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_QWEN_VISION: Settings = {
    "depth": 1, "num_heads": 2, "intermediate_size": 32, "patch_size": 14, "hidden_size": 32, "out_hidden_size": 64,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}

TEXT_FAMILIES: dict[str, Settings] = {
    "camembert": _ROBERTA,
    "data2vec-text": _ROBERTA,
    "hunyuan_v1_moe": {**COMMON, "num_experts": 4, "moe_topk": 2},
    "longcat_flash": {
        **COMMON,
        **_LATENT,
        "head_dim": 16,
        "num_key_value_heads": 4,
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 64,
        "n_routed_experts": 4,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "qk_head_dim": 32,
        "num_hidden_layers": 4,
    },
    "roberta": _ROBERTA,
    "roberta-prelayernorm": _ROBERTA,
    "whisper": {**_DECODER, "max_target_positions": 256, "suppress_tokens": None, "begin_suppress_tokens": None},
    "xlm-roberta": _ROBERTA,
    "xlm-roberta-xl": _ROBERTA,
    "xmod": {**_ROBERTA, "default_language": "en_XX", "languages": ["en_XX"]},
}
"""Served."""
MULTIMODAL: dict[str, Settings] = {
    "kosmos-2.5": {
        "text_config": {"attention_heads": 4, "embed_dim": 64, "ffn_dim": 96, "layers": 2, "vocab_size": 128,
                        "max_position_embeddings": 256, "pad_token_id": 1},
        "vision_config": {"head_dim": 16, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
                          "num_hidden_layers": 1, "patch_embed_hidden_size": 768},
        "latent_query_num": 4,
    },
    "qwen2_5_omni_thinker": {
        **_OMNI,
        "text_config": {**TEXT, "rope_parameters": _M_ROPE},
        "vision_config": {**_QWEN_VISION, "fullatt_block_indexes": [0]},
    },
    "qwen3_omni_moe_thinker": {
        **_OMNI,
        "text_config": {**TEXT, **_EXPERTS, "rope_parameters": _M_ROPE},
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
    "video_llama_3": {
        "text_config": {"model_type": "qwen2", **TEXT}, "vision_config": VISION, "image_token_id": 120,
        "video_token_id": 121,
    },
}  # fmt: skip
"""Served with text only."""
WRONG_POSITIONS = ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart")
"""Decoders that count positions by themselves, across the sequences of a step, and are refused for it."""


NEEDS_IMAGES: dict[str, Settings] = {
    "blip": {"text_config": {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "projection_dim": 16,
                             "num_attention_heads": 2, "vocab_size": 128, "encoder_hidden_size": 32},
             "vision_config": {**VISION, "projection_dim": 16}},
    "kosmos-2": {"text_config": {"attention_heads": 4, "embed_dim": 64, "ffn_dim": 96, "layers": 2, "vocab_size": 128},
                 "vision_config": VISION, "latent_query_num": 4},
}  # fmt: skip
"""Classes whose forward fails without an image."""


def settings_of_decoder() -> Settings:
    """A configuration of any of WRONG_POSITIONS."""
    return dict(_DECODER)
