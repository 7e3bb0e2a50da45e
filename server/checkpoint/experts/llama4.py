"""Llama 4's block of experts: the router's scores multiply the experts' inputs, and one shared expert adds to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from server.checkpoint.experts.module import NF4Experts


class Llama4Experts(nn.Module):
    """transformers' Llama4TextMoe, which runs every expert on every token, with the chosen experts only.

    Experts that were not chosen get zeros there and have no biases, so they add nothing.
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.top_k: int = block.top_k
        self.hidden: int = block.hidden_dim
        self.experts: NF4Experts = block.experts
        self.router: nn.Module = block.router
        self.shared_expert: nn.Module = block.shared_expert

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states [..., hidden] to [tokens, hidden], and the router's logits [tokens, experts]."""
        x = hidden_states.reshape(-1, self.hidden)
        scores, logits = self.router(x)
        chosen = torch.topk(logits, self.top_k, dim=1).indices
        inputs = x.unsqueeze(1) * scores.gather(1, chosen).unsqueeze(-1)
        ones = torch.ones_like(chosen, dtype=torch.float32)
        return self.shared_expert(x) + self.experts(inputs, chosen, ones), logits
