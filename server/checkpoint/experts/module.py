"""The experts of one layer in NF4, in the place of transformers' module of them."""

from __future__ import annotations

import torch
from torch import nn

from nf4_kernels.moe import moe_gated_linear, moe_linear
from server.checkpoint.weight import WeightBuffers

UNGATED = "relu2"
"""The activation of experts without gates (Nemotron 3)."""


class StackedWeight(WeightBuffers):
    """One projection of all experts, [experts, n, k] in NF4. bias is [experts, n] in the model's dtype."""


class NF4Experts(nn.Module):
    """A layer's experts: down(activation(gate x) * up x) of the experts that each token's router chose, weighted.

    gate_up [experts, 2 f, hidden] has f rows of gates, then f of ups; down is [experts, hidden, f]. With the activation
    UNGATED there are no gates, and gate_up is [experts, f, hidden]: down(relu(up x)^2).
    """

    def __init__(self, gate_up: StackedWeight, down: StackedWeight, activation: str) -> None:
        super().__init__()
        self.num_experts = gate_up.shape[0]
        self.activation = activation
        self.gate_up = gate_up
        self.down = down

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [tokens, hidden], the others [tokens, top_k]: [tokens, hidden].

        Each expert's output is rounded to the dtype of hidden_states, as transformers does; their weighted sum is float32,
        rounded once.
        """
        experts = top_k_index.to(torch.int32)
        gate_up, down = self.gate_up, self.down
        is_gated = self.activation != UNGATED
        if is_gated:
            inner = moe_gated_linear(hidden_states, gate_up.weight, experts, self.activation, gate_up.bias)
        else:
            inner = moe_linear(hidden_states, gate_up.weight, experts, gate_up.bias).relu().square()
        return moe_linear(inner, down.weight, experts, down.bias, top_k_weights.float(), follows_gated=is_gated)

    def extra_repr(self) -> str:
        """Text that print(model) has of it."""
        return f"experts={self.num_experts}, gate_up={self.gate_up.shape}, down={self.down.shape}"
