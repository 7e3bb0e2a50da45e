"""Computation and layout of a transformers module of experts, found out without its class's name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

from nf4_kernels.params import EXPERT_ACTIVATIONS
from nf4_kernels.reference import gated
from server.checkpoint.experts.llama4 import Llama4Experts
from server.checkpoint.experts.module import UNGATED, NF4Experts

_LAYER = re.compile(r".*\blayers\.(\d+)\.")


@dataclass(frozen=True)
class ExpertsLayout:
    """Layout of one layer's experts in transformers' module."""

    name: str
    layer: int
    count: int
    hidden: int
    inner: int
    transposed: bool
    """Stacked weights are [experts, inputs, outputs]."""
    interleaved: bool
    """Rows of gates and ups take turns: gate 0, up 0, gate 1, ..."""
    activation: str | None
    """One of EXPERT_ACTIVATIONS, or UNGATED; None where what the module computes is none of these."""
    kind: str

    @property
    def rows(self) -> int:
        """Rows of gates and ups for each feature between these and downs."""
        return 1 if self.activation == UNGATED else 2


def experts_layouts(model: nn.Module) -> Iterator[ExpertsLayout]:
    """The layout of every module in model that stacks the gates, ups and downs of a layer's experts, or ups and downs."""
    for name, module in model.named_modules():
        found = _LAYER.match(name)
        has_gate = getattr(module, "has_gate", True)
        gate_up, down = (
            module._parameters.get(part) for part in ("gate_up_proj" if has_gate else "up_proj", "down_proj")
        )
        count = getattr(module, "num_experts", None)
        if found is None or gate_up is None or down is None or gate_up.dim() != 3 or not isinstance(count, int):
            continue
        transposed = isinstance(module, Llama4TextExperts) or bool(getattr(module, "is_transposed", False))
        inner, hidden = down.shape[1:] if transposed else reversed(down.shape[1:])
        interleaved = not getattr(module, "is_concatenated", True)
        yield ExpertsLayout(
            name, int(found[1]), count, int(hidden), int(inner), transposed, interleaved,
            _activation(module, interleaved), type(module).__name__,
        )  # fmt: skip


def replace_experts(model: nn.Module, layout: ExpertsLayout, experts: NF4Experts) -> None:
    """Put experts in the place of the module with this layout, or in the place of what has replaced that module."""
    model.set_submodule(layout.name, experts)
    block = layout.name.rpartition(".")[0]
    parent = model.get_submodule(block)
    if isinstance(parent, Llama4TextMoe):
        model.set_submodule(block, Llama4Experts(parent))


def _activation(module: Any, interleaved: bool) -> str | None:
    """The module's activation between gates, ups and downs, found by trying numbers far below and far above its clamps."""
    if getattr(module, "has_post_expert_norm", False):
        return None
    # Models are made on no device and in their own dtype.
    values = torch.linspace(-20, 20, 41, dtype=torch.float32, device="cpu")
    if not getattr(module, "has_gate", True):
        function = getattr(module, "act_fn", None)
        return UNGATED if callable(function) and torch.allclose(function(values), values.relu().square()) else None
    gate_up = torch.stack((values.repeat_interleave(41), values.repeat(41)), 1)  # each row has one gate and one up
    if hasattr(module, "_apply_gate"):
        found = module._apply_gate(gate_up)
    elif isinstance(module, Llama4TextExperts):
        found = module.act_fn(gate_up[:, :1]) * gate_up[:, 1:]
    else:
        return None
    for activation in EXPERT_ACTIVATIONS:
        if torch.allclose(found, gated(gate_up, activation), rtol=1e-4, atol=1e-4):
            return activation
    return None
