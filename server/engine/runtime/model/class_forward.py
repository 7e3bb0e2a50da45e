"""Makes the forward of transformers' classes take what steps pass: which rows of logits they want, and positions from 0."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def takes(model: PreTrainedModel, name: str) -> bool:
    """Whether the class's forward has a parameter of that name. Others disappear in its **kwargs without an error."""
    return name in inspect.signature(type(model).forward).parameters


def adapt_forward(model: PreTrainedModel) -> None:
    """Let model's forward take logits_to_keep int64 [n], and position_ids that begin at 0, if its class does otherwise."""
    head = model.get_output_embeddings()
    if head is not None and not takes(model, "logits_to_keep"):
        _select_rows(model, head)
    text = model.config.get_text_config()
    for module in model.modules():
        padding = getattr(module, "padding_idx", None)
        if isinstance(padding, int) and hasattr(module, "create_position_ids_from_input_ids"):
            # RoBERTa's way: the first token is at padding_idx + 1.
            _shift_positions(module, padding + 1)
            table = getattr(module, "position_embeddings", None)
            if isinstance(table, nn.Embedding):
                text.max_position_embeddings = min(text.max_position_embeddings, table.num_embeddings - padding - 1)


def _select_rows(model: PreTrainedModel, head: nn.Module) -> None:
    wanted: list[torch.Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rows = kwargs.pop("logits_to_keep", None)
        wanted[:] = [] if rows is None else [rows]
        return args, kwargs

    def select(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        return (args[0][:, wanted.pop()], *args[1:]) if wanted else None

    model.register_forward_pre_hook(note, with_kwargs=True)
    head.register_forward_pre_hook(select)


def _shift_positions(embeddings: nn.Module, first: int) -> None:
    def shift(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"] + first
        return args, kwargs

    embeddings.register_forward_pre_hook(shift, with_kwargs=True)
