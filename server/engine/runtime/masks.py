"""Forbidden tokens out of the logits."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from server.engine.scheduling.sequence import Constraint


def apply_constraint(logits: torch.Tensor, constraint: Constraint, ends: Collection[int]) -> None:
    """Set what a grammar forbids to -inf in logits [vocabulary], in place; ends may come where the text may end.

    Raises GrammarError.
    """
    vocabulary, device = logits.shape[0], logits.device
    packed = torch.frombuffer(bytearray(constraint.allowed()), dtype=torch.uint8)[: -(-vocabulary // 8)].to(device)
    bits = torch.arange(8, dtype=torch.uint8, device=device)
    allowed = ((packed.unsqueeze(1) >> bits) & 1).flatten()[:vocabulary].bool()
    if ends and constraint.may_end:
        allowed[torch.tensor([i for i in ends if 0 <= i < vocabulary], device=device)] = True
    logits.masked_fill_(~allowed, -math.inf)
