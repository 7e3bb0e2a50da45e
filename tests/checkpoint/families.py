"""Text families with tiny configurations, and those that are refused: docs/models.md says the same, and a test compares."""

from __future__ import annotations

from typing import Any

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

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"n_layer": 2, "n_head": 4}, "use the attention interface"),
    "codegen": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}, "use the attention interface"),
    "gptj": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}, "use the attention interface"),
    "mpt": ({"d_model": 64, "n_layers": 2, "n_heads": 4}, "use the attention interface"),
    "xglm": ({"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96}, "use the attention interface"),
    "diffllama": ({}, "attends more than once"),
    "doge": ({}, "has a mask of its own"),
}
"""Families whose attention is not one that the paged cache serves, and what the refusal says."""
