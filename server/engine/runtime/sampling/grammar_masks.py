"""Tokens that grammars forbid: masked in the logits, or asked about one by one."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection

import numpy as np
import torch
from torch.nn.functional import embedding

from server.engine.grammar import MaskFiller
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


class MaskBuffer:
    """Finds the masks of a step's sequences. Their host memory is kept from step to step, pinned where a GPU copies it."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self._filler = MaskFiller()
        self._memory = torch.empty(0, -(-vocabulary // 32), dtype=torch.int32)

    def find(self, sequences: list[Sequence]) -> tuple[torch.Tensor, dict[int, str]]:
        """The tokens that sequences with grammars may have next: bit i of byte i // 8 is token i.

        uint8 [sequences, 4 * ceil(vocabulary / 32)] on the device, valid until the next call, which may come when the device
        has copied them. And by row, why a grammar cannot be followed; such a row holds anything.
        """
        count = len(sequences)
        if count > len(self._memory):
            shape = max(count, 2 * len(self._memory)), self._memory.shape[1]
            self._memory = torch.zeros(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        memory = self._memory[:count]
        constraints = [sequence.constraint for sequence in sequences if sequence.constraint is not None]
        masks = memory.numpy()
        failed = self._filler.fill(constraints, masks)
        found = masks.view(np.uint8)
        for row, (sequence, constraint) in enumerate(zip(sequences, constraints, strict=True)):
            ends = _ends(sequence)
            if row not in failed and ends and constraint.may_end:
                for token in ends:
                    if 0 <= token < self._vocabulary:
                        found[row, token // 8] |= 1 << token % 8
        errors = {row: f"the model failed: {type(e).__name__}: {first_line(e)}" for row, e in failed.items()}
        return memory.view(torch.uint8).to(self._device, non_blocking=True), errors


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
    """The rows whose token the sequence's grammar forbids; tokens has one for each sequence. Raises GrammarError."""
    return [row for row in rows if not _is_permitted(tokens[row], sequences[row])]


def _is_permitted(token: int, sequence: Sequence) -> bool:
    constraint = sequence.constraint
    assert constraint is not None
    return (token in _ends(sequence) and constraint.may_end) or constraint.permits(token)


def _ends(sequence: Sequence) -> Collection[int]:
    """Tokens that may end the sequence where its grammar lets the text end."""
    return sequence.stop_ids if not sequence.is_too_short else ()
