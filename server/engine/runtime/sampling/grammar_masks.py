"""Masks of the tokens that grammars permit."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from server.engine.grammar import GrammarError, MaskFiller, UnfollowableError
from server.engine.runtime.trials import first_line
from server.engine.scheduling.sequence import Sequence
from server.types import UNFOLLOWABLE


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
        errors = {row: _reason(error) for row, error in failed.items()}
        return memory.view(torch.uint8).to(self._device, non_blocking=True), errors


def _reason(error: GrammarError) -> str:
    reason = first_line(error)
    own = isinstance(error, UnfollowableError)
    return f"{UNFOLLOWABLE}: {reason}" if own else f"the model failed: GrammarError: {reason}"


def permitted_by_masks(masks: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """bool [rows]: whether each row of masks, uint8 [rows, bytes], has the bit of its token, int64 [rows]."""
    found = masks.gather(1, (tokens // 8).unsqueeze(1)).squeeze(1)
    return (found >> (tokens % 8).to(torch.uint8)) & 1 > 0


def is_permitted(token: int, sequence: Sequence) -> bool:
    """Whether a sequence's grammar permits this token next; False if the grammar cannot be followed any more."""
    constraint = sequence.constraint
    assert constraint is not None
    try:
        return (token in _ends(sequence) and constraint.may_end) or constraint.permits(token)
    except GrammarError:
        return False


def _ends(sequence: Sequence) -> Collection[int]:
    """Tokens that may end the sequence where its grammar lets the text end."""
    return sequence.stop_ids if not sequence.is_too_short else ()
