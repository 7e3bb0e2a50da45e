"""Small random mixtures of experts, saved as people have them: in NF4 or 16 bit, in the names and layouts found in the wild.

Each comes with its reference: the same numbers, expanded by the oracle, in transformers' own model.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
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
    "qwen2_moe": {
        "shared_expert_intermediate_size": 128,
        "decoder_sparse_step": 1,
        "sliding_window": 12,
        "max_window_layers": 1,
        "use_sliding_window": True,
    },
    "mixtral": {**_LOCAL, "sliding_window": 12},
    "olmoe": {},
    "glm4_moe": {**_GROUPS, "head_dim": 32},
    "deepseek_v2": {**_GROUPS, **_LATENT, "num_key_value_heads": 4, "topk_method": "greedy"},
    "deepseek_v3": {**_GROUPS, **_LATENT, "num_key_value_heads": 4},
    "granitemoe": {**_LOCAL, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    "phimoe": {**_LOCAL, "sliding_window": 12},
    # Its own attention within a chunk is that of other families.
    "llama4_text": {
        **_LOCAL,
        "head_dim": 32,
        "intermediate_size": 64,
        "intermediate_size_mlp": 128,
        "num_experts_per_tok": 1,
        "layer_types": ["full_attention"] * 2,
        "moe_layers": [1],
    },
    # Without inputs of each layer, as 26B-A4B.
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "attention_k_eq_v": True,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"1": {"head_dim": 32, "num_key_value_heads": 1}},
    },
    "gpt_oss": {
        **_LOCAL,
        "head_dim": 32,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "intermediate_size": 64,
    },
}
Rename = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
"""From a tensor under transformers' name to the tensors that are saved, by their names."""


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
    """Whether bitsandbytes' checkpoints have a tensor of that name in NF4: linear layers and experts, no routers."""
    experts = re.search(r"\.experts\.(gate_up|down)_proj$|\.block_sparse_moe\.(input|output)_linear\.weight$", name)
    return bool(experts) or (name.endswith(".weight") and not re.search(r"norm|embed|lm_head|\.(gate|router)\.", name))


def nowhere(name: str) -> bool:
    """That nothing is in NF4."""
    return False


def unchanged(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Saved by its own name."""
    return {name: tensor}


def unsloth_gpt_oss(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """gpt-oss as Unsloth quantizes it: a linear layer for each expert and for the router."""
    if match := re.fullmatch(r"(.*\.experts\.(?:gate_up|down)_proj)(_bias)?", name):
        what = "bias" if match[2] else "weight"
        return {f"{match[1]}s.{e}.{what}": part if match[2] else part.T for e, part in enumerate(tensor)}
    return {name.replace(".router.", ".router.linear."): tensor}


def separate_experts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Llama 4 as Unsloth quantizes it: three linear layers for each expert."""
    if match := re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name):
        saved = {}
        for e, part in enumerate(tensor):
            halves = part.T.chunk(2) if match[2] == "gate_up" else [part.T]
            parts = ("gate", "up") if match[2] == "gate_up" else ("down",)
            saved.update({f"{match[1]}.{e}.{own}_proj.weight": half for own, half in zip(parts, halves, strict=True)})
        return saved
    return {name: tensor}


def save_moe(
    folder: Path,
    model: PreTrainedModel,
    in_nf4: Callable[[str], bool] = is_projection,
    rename: Rename = unchanged,
    stacked: bool = False,
    nested: bool = True,
    blocksize: int = 64,
) -> PreTrainedModel:
    """Save model in folder, in NF4 where in_nf4 says so of the saved name; gives the reference.

    rename sees the tensors by the names that save_pretrained() gives them, or with stacked by those that they have in the
    model, and gives what is saved in their place.
    """
    model.save_pretrained(folder)
    own = dict(model.state_dict()) if stacked else load_file(folder / "model.safetensors")
    saved: dict[str, torch.Tensor] = {}
    for name, tensor in own.items():
        parts = rename(name, tensor)
        restored = []
        for new, part in parts.items():
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
        own[name] = _together(restored, tensor)
    plain = folder / "reference"
    reference = copy.deepcopy(model)
    if stacked:
        reference.load_state_dict(own)
        reference.save_pretrained(plain)
    else:
        plain.mkdir()
        save_file(own, plain / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(folder / "config.json", plain)
        reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    if any(map(in_nf4, saved)):
        config["quantization_config"] = {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": "float32",
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    return reference.eval().requires_grad_(False)


def _together(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Join what was saved in parts, in the order of transformers' dimensions."""
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2 * like.shape[0]:
        parts = [torch.cat(pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
    whole = torch.stack(parts)
    return whole if whole.dim() < 3 else whole.transpose(1, 2).contiguous()
