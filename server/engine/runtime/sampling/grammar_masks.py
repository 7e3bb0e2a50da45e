"""Tokens that grammars forbid: masked in the logits, or asked about one by one."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import embedding

from server.engine.grammar import fill_masks
from server.engine.runtime.sampling.device_options import DeviceOptions
from server.engine.runtime.trials import first_line
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
    added = embedding(packed.int(), _added(device, logits.dtype)).flatten(1)[:, :vocabulary]
    if rows == list(range(logits.shape[0])):
        logits += added
    else:
        logits.index_add_(0, torch.tensor(rows, device=device), added)


def find_masks(sequences: list[Sequence], vocabulary: int) -> tuple[npt.NDArray[np.uint8], dict[int, str]]:
    """The tokens that sequences with grammars may have next: bit i of byte i // 8 is token i.

    uint8 [sequences, 4 * ceil(vocabulary / 32)], found on several threads; and by row, why a grammar cannot be followed.
    """
    masks = np.zeros((len(sequences), -(-vocabulary // 32)), np.int32)
    constraints = [sequence.constraint for sequence in sequences if sequence.constraint is not None]
    failed = fill_masks(constraints, masks)
    found = masks.view(np.uint8)
    for row, (sequence, constraint) in enumerate(zip(sequences, constraints, strict=True)):
        ends = _ends(sequence)
        if row not in failed and ends and constraint.may_end:
            for token in ends:
                if 0 <= token < vocabulary:
                    found[row, token // 8] |= 1 << token % 8
    return found, {row: f"the model failed: {type(e).__name__}: {first_line(e)}" for row, e in failed.items()}


def mask(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
    """Set what masks, uint8 [N, bytes], forbid to -inf in N rows of float32 logits [rows, vocabulary], in place.

    places: int64 [N], the rows, no row twice.
    """
    (DeviceOptions.mask_rows or mask_with_torch)(logits, places, masks)


def mask_with_torch(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
    """mask() in torch's operations; logits of any float type."""
    added = embedding(masks.int(), _added(masks.device, logits.dtype)).flatten(1)[:, : logits.shape[1]]
    logits.index_add_(0, places, added)


@functools.cache
def _added(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return _ADDED.to(device, dtype)


def permitted_by_masks(masks: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """bool [rows]: whether each row of masks, uint8 [rows, bytes], has the bit of its token, int64 [rows]."""
    found = masks.gather(1, (tokens // 8).unsqueeze(1)).squeeze(1)
    return (found >> (tokens % 8).to(torch.uint8)) & 1 > 0


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
