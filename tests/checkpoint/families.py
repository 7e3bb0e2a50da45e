"""Text families with tiny configurations, and those that are refused: docs/models.md says the same, and a test compares."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

COMMON: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "head_dim": 16,
}  # fmt: skip
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
_PER_LAYER = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16}
_ALL_HEADS = {"num_key_value_heads": 4}

SERVED: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "codegen": {"rotary_dim": 8},
    "cohere": {},
    "cohere2": _ALTERNATING,
    "cwm": _ALTERNATING,
    "ernie4_5": {},
    "exaone4": _ALTERNATING,
    "gemma": {},
    "gemma2": {**_ALTERNATING, "attn_logit_softcapping": 2.0},
    "gemma3_text": _ALTERNATING,
    "gemma3n_text": {
        **_ALTERNATING, **_PER_LAYER, "num_kv_shared_layers": 0, "laurel_rank": 8, "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.5, 0.0],
    },
    "gemma4_text": {**_ALTERNATING, **_PER_LAYER, "per_layer_config": {"01": {"head_dim": 32}}},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 8},
    "granite": {"logits_scaling": 2.0},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hyperclovax": {},
    "internlm3": {},
    "jais2": {},
    "llama": {},
    "ministral": _ALTERNATING,
    "ministral3": {},
    "mistral": {"sliding_window": 12},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _ALTERNATING,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": _ALL_HEADS,
    "phi": _ALL_HEADS,
    "phi3": {"sliding_window": 12},
    "qwen2": {},
    "qwen3": {},
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {},
    "starcoder2": {"sliding_window": 12},
    "vaultgemma": _ALTERNATING,
}  # fmt: skip
"""Families whose checkpoints in NF4 are served, dense text models all."""

NEWER = ("codegen", "gptj")
"""Those of SERVED that transformers passes through its attention interface from 5.24 on, and that are refused before."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"n_layer": 2, "n_head": 4}, "use the attention interface"),
    "mpt": ({"d_model": 64, "n_layers": 2, "n_heads": 4}, "use the attention interface"),
    "xglm": ({"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96}, "use the attention interface"),
    "diffllama": ({}, "attends more than once"),
    "doge": ({}, "has a mask of its own"),
}
"""Families whose attention is not one that the paged cache serves, and what the refusal says."""


def skip_where_refused(family: str) -> None:
    """Skip a test of a family that the installed transformers is too old for: it lacks it, or the family is one of NEWER.

    That families of NEWER are refused has a test of its own, which runs with every version.
    """
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not have {family}")
    if family in NEWER:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.for_model(family))]
        if not model_class._supports_attention_backend:
            pytest.skip(f"transformers {transformers.__version__} has no attention interface in {model_class.__name__}")
