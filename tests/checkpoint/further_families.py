"""Families that few people serve, with tiny configurations: docs/models.md is generated from this list."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

from tests.checkpoint.families import COMMON
from tests.checkpoint.multimodal import CLASSES, VISION
from tests.checkpoint.test_hybrids import MODELS as HYBRIDS

Settings = dict[str, Any]

_EXPERTS: Settings = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_topk": 2, "top_k": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_num_shared_experts": 1, "n_shared_experts": 1, "num_shared_experts": 1,
}  # fmt: skip
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
_TEXT: Settings = {**COMMON, **_EXPERTS, **_LATENT}
_VISION: Settings = {**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
_DECODER = {"is_decoder": True}
# The first position is one behind the padding's.
_ROBERTA = {**_DECODER, "pad_token_id": 1}
_KINDS = ["sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPES = dict.fromkeys(_KINDS, _ROPE)
_SAM: Settings = {
    "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64,
    "patch_size": 16, "window_size": 2, "global_attn_indexes": [0], "mlp_dim": 32,
}  # fmt: skip
_VQ: Settings = {
    "embed_dim": 8, "latent_channels": 32, "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1,
    "resolution": 32, "attn_resolutions": [], "num_embeddings": 16, "hidden_size": 32, "num_attention_heads": 2,
    "projection_dim": 32, "image_token_embed_dim": 32, "num_patches": 4,
}  # fmt: skip
_AUDIO: Settings = {
    "d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "encoder_layers": 1, "num_mel_bins": 16,
    "output_dim": 64, "n_window": 10, "max_source_positions": 64, "downsample_hidden_size": 16,
}  # fmt: skip
_BART: Settings = {
    "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_layers": 2,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "vocab_size": 128, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "forced_eos_token_id": None, "decoder_start_token_id": 1,
}  # fmt: skip


def _axes(*sections: int) -> Settings:
    """A text part whose rotary embedding has positions of several axes."""
    return {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [*sections]}}}


SERVED: dict[str, Settings] = {
    "afmoe": {},
    "apertus1p5": {
        "image_token_id": 120, "audio_token_id": 121, "image_token_offset": 100, "audio_token_offset": 108,
        "vision_config": {**_VQ, "codebook_size": 8},
        "audio_config": {"model_type": "wavtokenizer_encoder", "codebook_size": 8},
    },
    "apertus1p5_text": {},
    "aria": {},
    "aria_text": {},
    "axk1": {},
    "beam": {},
    "bert": _DECODER,
    "bert-generation": _DECODER,
    "bitnet": {},
    "camembert": _ROBERTA,
    "chameleon": {"vocabulary_map": {"<image>": 120}, "vq_config": _VQ},
    "cohere2_moe": {},
    "cohere2_vision": {"alignment_intermediate_size": 64},
    "cohere_compass": {
        "text_config": {"layer_types": _KINDS, "sliding_window": 12, "rope_parameters": _ROPES},
        "vision_config": {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
    "cohere_compass_text": {"layer_types": _KINDS, "sliding_window": 12, "rope_parameters": _ROPES},
    "cosmos3_edge": {},
    "cosmos3_omni": {},
    "ctrl": {},
    "data2vec-text": _ROBERTA,
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4},
        "vision_config": {
            "sam_config": {**_SAM, "downsample_channels": [16, 32]},
            "encoder_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                               "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 8},
        },
    },
    "deepseek_vl": {},
    "deepseek_vl_hybrid": {"high_res_vision_config": {"model_type": "sam_vision_model", **_SAM}},
    "dots1": {},
    "electra": _DECODER,
    "emu3": {"vocabulary_map": {"<image>": 120}, "vq_config": {**_VQ, "codebook_size": 16}},
    "ernie": _DECODER,
    "ernie4_5_moe": {},
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [64, 64], "mlp_layer_types": ["dense", "sparse"],
                        "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}},
    },
    "exaone": {},
    "exaone4_5": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "flint": {"layer_types": _KINDS, "sliding_window": 12},
    "fuyu": {},
    "gemma4_unified": {
        "text_config": {"use_bidirectional_attention": "vision", "layer_types": _KINDS, "sliding_window": 12,
                        "num_kv_shared_layers": 0, "per_layer_config": {"1": {"head_dim": 32}}},
        "audio_config": None,
        "vision_config": {"patch_size": 14, "mm_embed_dim": 64, "mm_posemb_size": 80, "output_proj_dims": 64},
    },
    "gemma4_unified_text": {},
    "glm46v": _axes(2, 3, 3),
    "glm4_moe_lite": {},
    "glm4v": _axes(2, 3, 3),
    # With all experts of four: rounding would choose others.
    "glm4v_moe": {
        "text_config": {"num_experts_per_tok": 4, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2],
                                                                      "partial_rotary_factor": 0.5}},
    },
    "glm_ocr": _axes(2, 3, 3),
    "glmga": _axes(2, 3, 3),
    "got_ocr2": {},
    "gpt-sw3": {},
    "granite4_vision": {
        "downsample_rate": "1/2", "deepstack_layer_map": [[0, 0]], "spatial_target_layers": [0, 0, 1, 1],
        "vision_config": {"hidden_size": 64},
        "qformer_config": {"model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 32,
                           "cross_attention_frequency": 1, "max_position_embeddings": 16},
    },
    "granite_docling": {},
    "granite_swa": {},
    "granitemoe_swa": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hunyuan_vl": {
        **_axes(2, 2, 2, 2),
        "vision_config": {"text_hidden_size": 64, "max_image_size": 64, "min_image_size": 16, "img_max_token_num": 16,
                          "max_vit_seq_len": 64},
    },
    "hy_v3": {},
    "hyperclovax_vision_v2": {},
    "idefics2": {},
    "iquestcoder": {},
    "janus": {"vq_config": _VQ, "vision_config": {"projection_dim": 64}},
    "jetmoe": {},
    "kimi_k25": {},
    "kolibri1": {},
    "kosmos-2.5": {
        "text_config": {"attention_heads": 4, "embed_dim": 64, "ffn_dim": 96, "layers": 2, "pad_token_id": 1},
        "vision_config": {"head_dim": 16, "patch_embed_hidden_size": 768}, "latent_query_num": 4,
    },
    "laguna": {},
    "lighton_ocr": {},
    "llava_next_video": {},
    "llava_onevision": {},
    "longcat_flash": {
        "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 64,
        "zero_expert_num": 2, "qk_head_dim": 32,
    },
    "mellum": {},
    "mimo_v2_flash": {},
    "minicpm3": {},
    "minimax_m2": {},
    "minimax_m3_vl_text": {},
    "mistral4": {},
    "moshi": {"ffn_dim": 96},
    "moss_transcribe_diarize": {
        "audio_config": {"num_mel_bins": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
                         "hidden_size": 32, "max_source_positions": 64},
    },
    "muse_glimmer": {"projector_hidden_size": 64, "out_hidden_size": 128},
    "muse_spark": {
        "projector_hidden_size": 64, "out_hidden_size": 128, "text_config": {"moe_hidden_size": 64},
        "audio_config": {"out_hidden_size": 64, "patch_sizes": [4, 2], "hidden_sizes": [16, 32], "depths": [1, 1],
                         "num_hidden_layers": 2},
    },
    "ovis2": {
        "hidden_size": 64, "vocab_size": 128, "visual_indicator_token_ids": [110, 111, 112, 113, 114],
        "vision_config": {"vocab_size": 16},
    },
    "paddleocr_vl": _axes(2, 3, 3),
    "phi4_multimodal": {
        "vision_config": {**VISION, "crop_size": 28},
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2,
                         "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "input_size": 16,
                         "nemo_conv_channels": 32},
    },
    "pp_chart2table": {},
    "qianfan_ocr": {},
    "qwen2_5_omni_thinker": {**_axes(2, 3, 3), "audio_config": _AUDIO, "vision_config": {"fullatt_block_indexes": [0]}},
    "qwen3_omni_moe_thinker": {
        **_axes(2, 3, 3), "audio_config": _AUDIO,
        "vision_config": {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
    "qwen3_vl_moe": {},
    "roberta": _ROBERTA,
    "roberta-prelayernorm": _ROBERTA,
    "roc_bert": {**_DECODER, "enable_shape": False, "enable_pronunciation": False, "shape_vocab_size": 8,
                 "pronunciation_vocab_size": 8, "shape_embed_dim": 8, "pronunciation_embed_dim": 8},
    "sarvam_mla": {},
    "solar_open": {},
    "step3p7": {
        "text_config": {"layer_types": _KINDS, "sliding_window": 12, "mlp_layer_types": ["dense", "sparse"],
                        "num_sliding_attention_heads": 4, "query_pre_attn_scalar": 16, "share_expert_dim": 64,
                        "rope_parameters": _ROPES},
    },
    "video_llama_3": {},
    "video_llava": {},
    "vipllava": {},
    "whisper": {**_BART, "max_target_positions": 256, "suppress_tokens": None, "begin_suppress_tokens": None},
    "xlm-roberta": _ROBERTA,
    "xlm-roberta-xl": _ROBERTA,
    "xmod": {**_ROBERTA, "default_language": "en_XX", "languages": ["en_XX"]},
    "youtu": {},
}  # fmt: skip
"""Served, those of several parts with text only: what differs from tiny_settings()."""
WRITTEN = frozenset((
    "gemma4_unified", "gemma4_unified_text", "granitemoe_swa", "granitemoeshared",
    "apertus1p5", "apertus1p5_text", "aria", "aria_text", "cohere2_vision", "cohere_compass", "cohere_compass_text",
    "cosmos3_edge", "cosmos3_omni", "deepseek_ocr2", "deepseek_vl", "deepseek_vl_hybrid", "dots1", "emu3",
    "ernie4_5_moe", "exaone", "exaone4_5", "exaone_moe", "flex_olmo", "flint", "glm46v", "glm4v", "glm4v_moe", "glm_ocr",
    "glmga", "got_ocr2", "granite4_vision", "granite_docling", "granite_swa", "hunyuan_vl", "hyperclovax_vision_v2",
    "idefics2", "iquestcoder", "janus", "kolibri1", "lighton_ocr", "llava_next_video", "llava_onevision", "mellum",
    "moss_transcribe_diarize", "ovis2", "paddleocr_vl", "phi4_multimodal", "pp_chart2table", "qianfan_ocr",
    "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "qwen3_vl_moe", "solar_open", "video_llama_3", "video_llava",
    "vipllava", "glm4_moe_lite", "kimi_k25", "minicpm3", "sarvam_mla", "youtu", "afmoe", "cohere2_moe", "hy_v3",
    "minimax_m2", "muse_glimmer",
))  # fmt: skip
"""Those of SERVED whose layers are written ones; the others run by transformers' own code."""
WRONG_POSITIONS: dict[str, Settings] = dict.fromkeys(
    ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart"), _BART
)
"""Decoders that count positions by themselves, across the sequences of a step, and are refused for it."""
NEEDS_IMAGES: dict[str, Settings] = {
    "blip": {"text_config": {"encoder_hidden_size": 32, "projection_dim": 16}, "vision_config": {"projection_dim": 16}},
    "kosmos-2": {"text_config": {"attention_heads": 4, "embed_dim": 64, "ffn_dim": 96, "layers": 2},
                 "latent_query_num": 4},
}  # fmt: skip
"""Classes whose forward fails without an image."""
FROM_16_BIT: dict[str, Settings] = {
    "minimax_m3_vl": {},
    "molmo2": {
        "text_config": {"additional_vocab_size": 8},
        "vision_config": {"image_size": [28, 28], "num_key_value_heads": 2, "head_dim": 16},
        "adapter_config": {
            "vision_feature_layer": [0],
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 32,
            "text_hidden_size": 64,
        },
    },
    "sarvam_moe": {},
}
"""Classes whose tensors transformers splits or joins while loading, which cannot be done in 4 bit."""
WHOLE_TOWERS = ("kimi_k25", "qianfan_ocr", "step3p7")
"""Classes whose towers transformers cannot save in NF4, or not read again."""
FURTHER = SERVED | WRONG_POSITIONS | NEEDS_IMAGES | FROM_16_BIT


def skip_unless_known(family: str) -> None:
    """Skip a test of a family that the installed transformers is too old for."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not have {family}")


def settings_of(family: str) -> Settings:
    """A tiny configuration of a family of FURTHER, of a multimodal class, or of a hybrid."""
    if family in CLASSES or family in HYBRIDS:
        return (CLASSES | HYBRIDS)[family]
    return _merged(_tiny(family), FURTHER[family])


def _tiny(family: str) -> Settings:
    """The fields that a configuration of this type has, and its text's and its images' part, in tiny sizes."""
    config_class = CONFIG_MAPPING[family]
    if "text_config" not in config_class.sub_configs:
        return _latent(_known(config_class, _TEXT))
    example = config_class()
    found = {name: 120 for name in vars(example) if name.endswith(("_token_id", "_token_index")) and "image" in name}
    found |= {name: 121 for name in vars(example) if name.endswith(("_token_id", "_token_index")) and "video" in name}
    for name, sizes in (("text_config", _TEXT), ("vision_config", _VISION)):
        part = getattr(example, name, None)
        if part is not None:
            found[name] = {"model_type": part.model_type, **_latent(_known(type(part), sizes))}
            if "mrope_section" in (getattr(part, "rope_parameters", None) or {}):
                found[name]["rope_parameters"] = {**_ROPE, "mrope_section": [2, 3, 3]}
    return found


def _latent(settings: Settings) -> Settings:
    """Multi-head latent attention has as many key heads as query heads."""
    return settings | {"num_key_value_heads": 4} if "kv_lora_rank" in settings else settings


def _known(config_class: Any, settings: Settings) -> Settings:
    fields = {*inspect.signature(config_class.__init__).parameters, *config_class.attribute_map}
    if dataclasses.is_dataclass(config_class):
        fields |= {field.name for field in dataclasses.fields(config_class)}
    return {name: value for name, value in settings.items() if name in fields}


def _merged(settings: Settings, changes: Settings) -> Settings:
    merged = dict(settings)
    for name, value in changes.items():
        own = merged.get(name)
        replaces = "model_type" in value if isinstance(value, dict) else True
        merged[name] = own | value if name.endswith("_config") and isinstance(own, dict) and not replaces else value
    return merged
