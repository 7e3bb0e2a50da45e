"""Along which dimension projections are split: by transformers' plan of a model, else by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

# For models without a plan: projections that are split along n, and those that are split along k.
_SPLIT_N = {"q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "fc1"}
# Latent attention: from the latent vectors, which every rank has, to the keys, values and queries of each head.
_SPLIT_N |= {"q_b_proj", "kv_b_proj"}
# Layers with states, which transformers' plans divide otherwise (see states.py), and LFM2's MLP.
_SPLIT_N |= {"in_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "w1", "w3"}
_SPLIT_K = {"o_proj", "out_proj", "dense", "down_proj", "fc2", "w2"}


def plan_of(config: PretrainedConfig) -> Mapping[str, str]:
    """transformers' plan of the text model: how projections are split, by patterns of their names; it may be empty."""
    text: Any = config.get_text_config()
    return getattr(text, "base_model_tp_plan", None) or {}


def role_of(name: str, plan: Mapping[str, str]) -> str | None:
    """The dimension along which a projection is split: "n", "k", or None."""
    general = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    style = next((style for key, style in plan.items() if general == key or general.endswith(f".{key}")), None)
    last = name.rpartition(".")[2]
    if style == "colwise_gather_output" and last in _SPLIT_K:
        return "k"
    if style is not None:
        return "n" if style.startswith("colwise") else "k" if style.startswith("rowwise") else None
    return "n" if last in _SPLIT_N else "k" if last in _SPLIT_K else None
