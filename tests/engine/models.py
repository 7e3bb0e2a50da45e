"""Tiny random models of the families that the engine serves."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.checkpoint.families import skip_where_refused

VOCABULARY = 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_GEMMA = {"head_dim": 16, "sliding_window": 12, "num_hidden_layers": 4}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 12},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "layer_types": _ALTERNATING},
    "gemma3_text": {**_GEMMA, "query_pre_attn_scalar": 24, "layer_types": _ALTERNATING},
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": 12},
    "gpt2": {"n_inner": 96},
    "gpt_bigcode": {"n_inner": 96},
    "gptj": {"n_inner": 96, "rotary_dim": 8},
    "codegen": {"n_inner": 96, "rotary_dim": 8},
    # The last layers attend over keys and values of earlier ones.
    "gemma3n_text": {
        **_GEMMA,
        "num_kv_shared_layers": 2,
        "layer_types": _ALTERNATING,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "gemma4_text": {
        "sliding_window": 12,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": _ALTERNATING,
        "head_dim": 16,
        "per_layer_config": {"01": {"head_dim": 32}, "03": {"head_dim": 32}},
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
    },
    # Latent attention.
    "youtu": _LATENT,
    "minicpm3": {**_LATENT, "q_lora_rank": None, "qk_nope_head_dim": 24},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.2},
    # Attention sinks.
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_chunk_size": 32,
    "mamba_expand": 2,
    "max_position_embeddings": 8192,
}
# Layers that keep a state of each sequence among others that attend.
HYBRIDS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        **MAMBA2,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "falcon_h1": {
        **MAMBA2,
        "mamba_d_ssm": 128,
        "num_hidden_layers": 2,
        "mamba_norm_before_gate": False,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.5,
        "mlp_multipliers": [0.8, 0.5],
        "key_multiplier": 0.6,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.7,
        "ssm_in_multiplier": 0.8,
        "ssm_out_multiplier": 0.6,
        "ssm_multipliers": [0.4, 0.9, 0.5, 0.8, 1.1],
    },
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 24,
        "chunk_size": 32,
        "head_dim": 16,
        "hybrid_override_pattern": "M*-EM*",
        "n_routed_experts": 8,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 96,
        "num_hidden_layers": 6,
        "time_step_min": 0.1,
        "max_position_embeddings": 8192,
    },
    "lfm2": {
        "num_hidden_layers": 5,
        "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
        "max_position_embeddings": 8192,
    },
    "qwen3_5_text": {
        "head_dim": 32,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "max_position_embeddings": 8192,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
}


def nf4(k: int, n: int, dtype: torch.dtype = torch.bfloat16, weight: torch.Tensor | None = None) -> Linear4bit:
    """A layer of a weight [n, k], random if None, quantized on CPU."""
    layer = Linear4bit(k, n, bias=False, compute_dtype=dtype, quant_type="nf4")
    values = torch.randn(n, k) * 0.15 if weight is None else weight
    layer.weight = Params4bit(values.to(dtype), requires_grad=False, quant_type="nf4")
    moved: Linear4bit = layer.to("cpu")
    return moved


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random float32 model in eval mode; weights large enough that attention matters.

    Skips a test of a family that the installed transformers is too old for.
    """
    skip_where_refused(family)
    config = CONFIG_MAPPING[family](**{**COMMON, **(FAMILIES | HYBRIDS).get(family, {}), **overrides})
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    return model.eval().requires_grad_(False)
