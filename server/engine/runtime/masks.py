"""Forbidden tokens out of the logits."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

from server.engine.scheduling.sequence import Constraint

_BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


def apply_constraints(
    logits: torch.Tensor, rows: Sequence[int], constraints: Sequence[Constraint], ends: Sequence[Collection[int]]
) -> None:
    """Set what grammars forbid to -inf in some rows of logits [sequences, vocabulary], in place, all at once.

    ends[i] are tokens that may come where the text of constraints[i] may end. Raises GrammarError.
    """
    vocabulary, device = logits.shape[1], logits.device
    width = -(-vocabulary // 8)
    table = bytearray()
    for constraint, own_ends in zip(constraints, ends, strict=True):
        mask = bytearray(constraint.allowed()[:width])
        if own_ends and constraint.may_end:
            for token in own_ends:
                if 0 <= token < vocabulary:
                    mask[token // 8] |= 1 << token % 8
        table += mask
    packed = torch.frombuffer(table, dtype=torch.uint8).view(len(rows), width, 1).to(device)
    forbidden = ((packed & _BITS.to(device)) == 0).flatten(1)[:, :vocabulary]
    if len(rows) == logits.shape[0]:
        logits.masked_fill_(forbidden, -math.inf)
    else:
        chosen = torch.tensor(rows, device=device)
        logits[chosen] = logits[chosen].masked_fill(forbidden, -math.inf)
