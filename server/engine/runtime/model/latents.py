"""Latent attention whose cache keeps a token's latent rather than keys and values of all heads."""

from __future__ import annotations

import logging
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from torch import nn
from transformers import PreTrainedModel

from server.engine.runtime.attention.calls import LATENT_HEADS, is_attending
from server.engine.runtime.attention.latent import DenseHeads, HeadSizes, LatentHeads
from server.engine.runtime.attention.packed_heads import PackedHeads
from server.engine.runtime.exchange import agreed
from server.engine.runtime.model.cpu_linear import CpuNF4Linear
from server.engine.runtime.model.lora import bias_of, dequantized
from server.engine.runtime.model.projections import NF4Linear

logger = logging.getLogger(__name__)

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def keep_latents(model: PreTrainedModel) -> None:
    """Let the model's latent attention give latents in the place of keys and values, if all its layers can.

    Outside attending() the class computes what it did. The log says what it costs where they cannot. All ranks of a divided
    model must call it, once projections are in their final form.
    """
    modules = [module for module in model.get_decoder().modules() if _is_latent(module)]
    if not modules:
        return
    reason = next((reason for reason in map(_unsuitable, modules) if reason), None)
    if not agreed(reason is None):
        first: Any = modules[0]
        full = first.num_heads * (first.qk_nope_head_dim + first.qk_rope_head_dim + first.v_head_dim)
        logger.warning(
            "the KV cache keeps keys and values of all heads, %d numbers for a token and layer rather than %d: %s",
            full,
            first.kv_lora_rank + first.qk_rope_head_dim,
            reason or "so it is on another rank",
        )
        return
    for module in modules:
        _keep(module, model.dtype)


def _is_latent(module: Any) -> bool:
    return all(isinstance(getattr(module, name, None), int) for name in _SIZES) and hasattr(module, "expand_kv")


def _unsuitable(module: Any) -> str | None:
    linear: nn.Module = module.kv_b_proj
    plain = isinstance(linear, nn.Linear) and not isinstance(linear, Linear4bit)
    if not plain and not isinstance(linear, NF4Linear | CpuNF4Linear):
        # An adapter's factors come after this, from step to step.
        return f"kv_b_proj is a {type(linear).__name__}"
    return None if bias_of(linear) is None else "kv_b_proj has a bias"


def _keep(module: Any, dtype: torch.dtype) -> None:
    own = module.expand_kv

    def expand_kv(latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not is_attending():
            found: tuple[torch.Tensor, torch.Tensor] = own(latent, rotary)
            return found
        return torch.cat((latent, rotary), -1), latent

    setattr(module, LATENT_HEADS, _heads(module, dtype))
    module.expand_kv = expand_kv


def _heads(module: Any, dtype: torch.dtype) -> LatentHeads:
    linear: nn.Module = module.kv_b_proj
    plain, width = module.qk_nope_head_dim, module.v_head_dim
    sizes = HeadSizes(module.kv_b_proj.out_features // (plain + width), plain, width, module.kv_lora_rank)
    if isinstance(linear, CpuNF4Linear):
        try:
            return PackedHeads(linear.weight, sizes, linear)
        except ValueError as e:
            logger.info(
                "the matrices of latent attention are kept in %s, in which reading them takes longer: %s", dtype, e
            )
    copy = linear.expanded if isinstance(linear, NF4Linear) else None
    return DenseHeads.of(dequantized(linear, dtype) if copy is None else copy, sizes, linear)
