"""Cutting of a step's chunks of prompts into pieces for layers with states, so that its tensors take bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from server.engine.runtime.states.kinds import StateKind
from server.engine.runtime.states.pool import StateStep

CHUNK = 64
"""Tokens that a program of a convolution takes, and a chunk of fla's has."""
MAX_LIVE_BYTES = 200 << 20
"""Of the tensors of a piece of a step, those of fla included."""


@dataclass(frozen=True)
class Piece:
    """Sequences' chunks that lie one after the other: rows begin ... end - 1 of a step."""

    begin: int
    end: int
    bounds: torch.Tensor
    """int64 [S + 1]: sequence i has the rows bounds[i] ... bounds[i + 1] - 1 of the piece."""
    chunks: torch.Tensor
    """int64 [chunks, 2]: the sequence of each CHUNK rows, and how many chunks of it come before."""
    slots: torch.Tensor
    """int32 [S], -1 for padding."""
    has_state: torch.Tensor
    """bool [S]."""


def cut(max_rows: int, lengths: Sequence[int], slots: torch.Tensor, has_state: torch.Tensor) -> list[Piece]:
    """Chunks of these lengths, which lie one after the other, in pieces of up to max_rows rows or one CHUNK.

    slots and has_state are on the device.
    """
    return [_piece(begin, parts, slots, has_state) for begin, parts in _cut(lengths, max(CHUNK, max_rows)) if parts]


def pieces_of(step: StateStep, kind: StateKind, tokens: int, max_rows: int) -> list[Piece]:
    """A step's chunks, T = `tokens` rows, cut once for all layers of a kind. Those of a graph are one piece."""
    if kind not in step.shared:
        if step.is_captured:
            step.shared[kind] = [_captured(step, tokens)]
        else:
            step.shared[kind] = cut(max_rows, step.lengths, step.chunks, step.has_state)
    found: list[Piece] = step.shared[kind]
    return found


def results_like(x: torch.Tensor, pieces: Sequence[Piece], columns: int) -> torch.Tensor:
    """Memory for results [T, columns] of x [T, any] by pieces; rows behind these are zeros."""
    is_whole = bool(pieces) and pieces[-1].end == len(x)
    return (x.new_empty if is_whole else x.new_zeros)(len(x), columns)


def _captured(step: StateStep, tokens: int) -> Piece:
    """All chunks of a graph, whose lengths are on the device. Surplus entries of `chunks` lie beyond a sequence's end."""
    bounds = step.query_start_loc.long()
    counts = (bounds.diff() + (CHUNK - 1)) // CHUNK
    ends = counts.cumsum(0)
    entry = torch.arange(tokens // CHUNK + len(counts), device=bounds.device)
    sequence = torch.searchsorted(ends, entry, right=True).clamp(max=len(counts) - 1)
    chunks = torch.stack((sequence, entry - (ends - counts)[sequence]), 1)
    return Piece(0, tokens, bounds, chunks, step.chunks, step.has_state)


@dataclass(frozen=True)
class Singles:
    """Common parts of pieces of one token of each sequence, made before graphs are captured, which read it."""

    bounds: torch.Tensor
    chunks: torch.Tensor
    has_state: torch.Tensor

    @classmethod
    def of(cls, max_sequences: int, device: torch.device) -> Singles:
        """For up to max_sequences sequences, and for the two that run in the check of a start."""
        bounds = torch.arange(max(2, max_sequences) + 1, device=device)
        chunks = torch.stack((bounds[:-1], torch.zeros_like(bounds[:-1])), 1)
        return cls(bounds, chunks, torch.ones_like(bounds[:-1], dtype=torch.bool))

    def piece(self, slots: torch.Tensor) -> Piece:
        """The piece of sequences at these slots, all of which go on."""
        count = slots.shape[0]
        return Piece(0, count, self.bounds[: count + 1], self.chunks[:count], slots, self.has_state[:count])


def _cut(lengths: Sequence[int], max_rows: int) -> Iterator[tuple[int, list[tuple[int, int, bool]]]]:
    """Pieces of at most max_rows rows: the first row, and (sequence, tokens, whether it goes on) of each of its chunks."""
    begin, room = 0, max_rows
    parts: list[tuple[int, int, bool]] = []
    for sequence, length in enumerate(lengths):
        done = 0
        while done < length:
            if not room:
                yield begin, parts
                begin, room, parts = begin + max_rows, max_rows, []
            taken = min(room, length - done)
            parts.append((sequence, taken, done > 0))
            done, room = done + taken, room - taken
    yield begin, parts


def _piece(begin: int, parts: Sequence[tuple[int, int, bool]], slots: torch.Tensor, has_state: torch.Tensor) -> Piece:
    tokens = [taken for _, taken, _ in parts]
    bounds = [sum(tokens[:i]) for i in range(len(tokens) + 1)]
    chunks_ = [(i, chunk) for i, taken in enumerate(tokens) for chunk in range(-(-taken // CHUNK))]
    sequences = [sequence for sequence, _, _ in parts]
    flat = torch.tensor(
        [*bounds, *sequences, *(goes_on for *_, goes_on in parts), *(x for pair in chunks_ for x in pair)]
    )
    if slots.is_cuda:
        flat = flat.pin_memory()
    of_bounds, which, goes_on, pairs = flat.to(slots.device, non_blocking=True).split(
        [len(bounds), len(parts), len(parts), 2 * len(chunks_)]
    )
    return Piece(
        begin,
        begin + bounds[-1],
        # fla keeps what it derives from a tensor, by the tensor: every piece has its own.
        of_bounds.clone(),
        pairs.view(-1, 2).clone(),
        slots[which].contiguous(),
        has_state[which] | goes_on.bool(),
    )
