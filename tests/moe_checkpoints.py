"""Small random mixtures of experts, saved as people have them: in NF4 or 16 bit, in the names and layouts found in the wild.

Each comes with its reference: the same numbers, expanded by the oracle, in transformers' own model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import quantize_4bit
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nf4_kernels import Weight
from nf4_kernels.reference import dequantize

VOCABULARY = 128
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False, "num_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
_LOCAL = {"num_local_experts": 8}
_GROUPS = {"n_group": 2, "topk_group": 1, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 32, "norm_topk_prob": True, "decoder_sparse_step": 1},
    "qwen2_moe": {"shared_expert_intermediate_size": 128, "decoder_sparse_step": 1},
    "mixtral": _LOCAL,
    "olmoe": {},
    "glm4_moe": {**_GROUPS, "head_dim": 32},
    "deepseek_v2": {**_GROUPS, **_LATENT, "num_key_value_heads": 4, "topk_method": "greedy"},
    "deepseek_v3": {**_GROUPS, **_LATENT, "num_key_value_heads": 4},
    "granitemoe": {**_LOCAL, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    "phimoe": _LOCAL,
    "gpt_oss": {
        **_LOCAL, "head_dim": 32, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, "intermediate_size": 64,
    },
}
Rename = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
"""What a tensor of transformers' own names is saved as."""


def tiny_moe(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random float32 model in eval mode; weights large enough that the experts' choice matters."""
    config = CONFIG_MAPPING[family](**{**_COMMON, **FAMILIES[family], **overrides})
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "bias" in name or "sinks" in name:
                parameter.normal_(0, 0.15)
    return model.eval().requires_grad_(False)


def is_projection(name: str) -> bool:
    """Whether transformers and bitsandbytes have a weight of that name in NF4: linear layers and experts."""
    return name.endswith(".weight") and not re.search(r"norm|embed|lm_head|\.(gate|router)\.", name)


def save_moe(
    folder: Path,
    model: PreTrainedModel,
    in_nf4: Callable[[str], bool] = is_projection,
    rename: Rename = lambda name, tensor: {name: tensor},
    nested: bool = True,
    blocksize: int = 64,
) -> PreTrainedModel:
    """Save model in folder, in NF4 where in_nf4 says so of the saved name; gives the reference.

    rename sees transformers' own tensors, as save_pretrained() names them, and gives what is saved in their place.
    """
    plain = folder / "reference"
    model.save_pretrained(plain)
    config = json.loads((plain / "config.json").read_text())
    saved: dict[str, torch.Tensor] = {}
    own = load_file(plain / "model.safetensors")
    for name, tensor in own.items():
        restored = []
        for new, part in rename(name, tensor).items():
            if not in_nf4(new):
                saved[new] = part.contiguous()
                restored.append(part)
                continue
            packed, state = quantize_4bit(
                part.contiguous(), blocksize=blocksize, quant_type="nf4", compress_statistics=nested
            )
            saved[new] = packed
            saved.update({f"{new}.{key}": value for key, value in state.as_dict(packed=True).items()})
            restored.append(dequantize(Weight.from_quant_state(packed, state), torch.float32))
        if len(restored) == 1 and restored[0].shape == tensor.shape:
            own[name] = restored[0]
        else:
            own[name] = _RESTORE[len(restored) > 1](torch.stack(restored), tensor)
    save_file(own, plain / "model.safetensors", metadata={"format": "pt"})
    if any(map(in_nf4, saved)):
        config["quantization_config"] = {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": "float32",
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    reference: PreTrainedModel = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    return reference.eval().requires_grad_(False)


def _unstacked(parts: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Experts that were saved one by one, stacked again in the order of transformers' dimensions."""
    return parts if parts.shape == like.shape else parts.transpose(1, 2)


_RESTORE = {True: _unstacked, False: lambda parts, like: parts[0].reshape(like.shape)}
