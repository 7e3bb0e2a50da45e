"""Shards of multimodal classes: the text model in them is divided as a model of its own would be; towers stay whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from server.checkpoint.classes import leave_out_towers
from server.checkpoint.sharding.roles import plan_of, role_of
from server.checkpoint.sharding.shards import heads_of


def set_type(config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Have every part of a configuration make models in dtype, and forget how their weights were quantized."""
    for each in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if each is not None:
            each.dtype = dtype
            if hasattr(each, "quantization_config"):
                del each.quantization_config


def keep_text_model(whole: PreTrainedModel, own: PreTrainedModel, towers: bool = False) -> None:
    """Take what only images and sounds go through out of a model and its shard, and give the shard the model's heads.

    Both are on the meta device; own is what the class makes of shard_config(). towers: whether it keeps its towers.
    """
    for model in (whole,) if towers else (whole, own):
        leave_out_towers(model)
    plan, modules = plan_of(whole.config), dict(own.named_modules())
    for name, module in whole.named_modules():
        dim = getattr(module, "head_dim", None)
        if isinstance(dim, int) and getattr(modules[name], "head_dim", dim) != dim:
            heads = (heads_of(model.config.get_text_config()) for model in (whole, own))
            sizes = {of_all * dim: of_shard * dim for of_all, of_shard in zip(*heads, strict=True)}
            _set_head_dim(name, modules[name], module, sizes, plan)


def _set_head_dim(name: str, own: nn.Module, whole: nn.Module, sizes: dict[int, int], plan: Mapping[str, str]) -> None:
    """Make an attention one of fewer heads where its class (Qwen2-VL) made it one of larger heads.

    It divides the hidden size by the number of heads. sizes: features of all the model's heads, and of those of the shard.
    """
    own.head_dim, own.scaling = whole.head_dim, whole.scaling
    for child, linear in whole.named_children():
        if isinstance(linear, nn.Linear):
            n, k = linear.out_features, linear.in_features
            if role_of(f"{name}.{child}", plan) == "k":
                k = sizes.get(k, k)
            else:
                n = sizes.get(n, n)
            setattr(own, child, nn.Linear(k, n, linear.bias is not None, "meta", linear.weight.dtype))


def initialize_buffers(model: PreTrainedModel, module: nn.Module, device: torch.device) -> None:
    """Give a module of a model on the meta device memory, and its buffers (rotary frequencies) their values."""
    module.to_empty(device=device, recurse=False)
    _innermost(model, module)._init_weights(module)


def _innermost(model: PreTrainedModel, module: nn.Module) -> PreTrainedModel:
    """The innermost model within a model that a module belongs to: its class knows the values of the module's buffers."""
    inner = [child for child in model.modules() if isinstance(child, PreTrainedModel)]
    return next(each for each in reversed(inner) if any(own is module for own in each.modules()))
