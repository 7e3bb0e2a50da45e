"""One forward pass as tensors: the chunks of a step, flattened into one row of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from server.engine.scheduling.scheduler import Step


@dataclass(frozen=True)
class Span:
    """One sequence in a batch: rows [row, row + length) of the batch are its tokens [start, start + length)."""

    row: int
    start: int
    length: int
    blocks: tuple[int, ...]
    """Cache blocks that hold its tokens [0, start + length)."""
    adapter: int | None = None
    """The slot of its LoRA adapter, if it has one."""

    @property
    def end(self) -> int:
        """Tokens in the cache once the batch has been computed."""
        return self.start + self.length


@dataclass(frozen=True)
class Batch:
    """T tokens of all sequences of a step. The first num_single spans are one token each.

    ids, positions, slots: int64 [T]; a slot is block * block_size + offset. sampled_rows: int64, the rows whose logits
    are wanted: first those that tokens are sampled from, then those of prompt tokens that are scored.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sampled_rows: torch.Tensor
    spans: tuple[Span, ...]
    num_single: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.ids.shape[0]


def build_batch(step: Step, block_size: int, device: torch.device) -> Batch:
    """The batch that computes a step; its chunks of one token must come first."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sampled_rows: list[int] = []
    scored_rows: list[int] = []
    spans: list[Span] = []
    for chunk in step.chunks:
        sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.length
        blocks = sequence.blocks
        spans.append(Span(len(ids), start, chunk.length, tuple(blocks[: -(-end // block_size)]), sequence.adapter))
        scored_rows.extend(len(ids) + position - start for position in chunk.scored)
        ids.extend(sequence.tokens[start:end])
        positions.extend(range(start, end))
        slots.extend(blocks[p // block_size] * block_size + p % block_size for p in range(start, end))
        if chunk.samples:
            sampled_rows.append(len(ids) - 1)
    num_single = next((i for i, span in enumerate(spans) if span.length > 1), len(spans))
    # One transfer for everything; from other than pinned memory it would wait for the step that is running.
    numbers = [*ids, *positions, *slots, *sampled_rows, *scored_rows]
    table = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    count = len(ids)
    return Batch(
        table[:count],
        table[count : 2 * count],
        table[2 * count : 3 * count],
        table[3 * count :],
        tuple(spans),
        num_single,
    )
