"""Tokens that grammars forbid: masked in the logits, or asked about one by one."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch.nn.functional import embedding

from server.engine.scheduling.sequence import Sequence

# By byte of a mask, what its eight tokens' bits add to their logits. One gather and one sum take a tenth of the time of
# unpacking the bits and masked_fill_, whose branches are mispredicted.
_ADDED = torch.tensor([[0.0 if byte >> bit & 1 else -math.inf for bit in range(8)] for byte in range(256)])


def apply_constraints(logits: torch.Tensor, rows: list[int], sequences: list[Sequence]) -> None:
    """Set what grammars forbid to -inf in some rows of logits, float [sequences, vocabulary], in place, all at once.

    The sequences of these rows have constraints. Raises GrammarError.
    """
    if not rows:
        return
    vocabulary, device = logits.shape[1], logits.device
    width = -(-vocabulary // 8)
    table = bytearray()
    for row in rows:
        constraint, ends = sequences[row].constraint, _ends(sequences[row])
        assert constraint is not None
        mask = bytearray(constraint.allowed()[:width])
        if ends and constraint.may_end:
            for token in ends:
                if 0 <= token < vocabulary:
                    mask[token // 8] |= 1 << token % 8
        table += mask
    packed = torch.frombuffer(table, dtype=torch.uint8).view(len(rows), width).to(device)
    added = embedding(packed.int(), _ADDED.to(device, logits.dtype)).flatten(1)[:, :vocabulary]
    if len(rows) == logits.shape[0]:
        logits += added
    else:
        logits.index_add_(0, torch.tensor(rows, device=device), added)


def refused(tokens: list[int], rows: list[int], sequences: list[Sequence]) -> list[int]:
    """Those of rows whose token (tokens has one for each sequence) the sequence's grammar forbids. Raises GrammarError."""
    return [row for row in rows if not _is_permitted(tokens[row], sequences[row])]


def _is_permitted(token: int, sequence: Sequence) -> bool:
    constraint = sequence.constraint
    assert constraint is not None
    return (token in _ends(sequence) and constraint.may_end) or constraint.permits(token)


def _ends(sequence: Sequence) -> Collection[int]:
    """Tokens that may end the sequence where its grammar lets the text end."""
    return sequence.stop_ids if sequence.num_generated >= sequence.sampling.min_tokens else ()
