"""Decode steps' attention by our own kernel: which sequence's keys each of its thread blocks goes through.

FlashInfer takes two launches for such a step, and a third one writes the new keys and values. With few sequences these
launches are bound by latency alone; our kernel does all of it in one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from server.engine.runtime.attention.base import AttentionBackend, AttentionOptions
from server.engine.runtime.attention.flashinfer_graphs import Kind
from server.engine.runtime.attention.rotary import RotaryEmbedding
from server.engine.runtime.batch import Batch, Span
from server.engine.runtime.trials import relative_error

SMALLEST_PART = 64
"""A sequence's keys are split into parts of at least this many: reducing more parts would take longer than it saves."""
# A part's keys are a multiple of this.
_PART_MULTIPLE = 64
# Parts beyond one for each sequence, in multiples of the device's multiprocessors.
_SPARE = 4
# A sequence is split only if it is longer than a part by more than this factor.
_SLACK = 1.25
HEADER = 8
FIELDS = 8


def split_keys(lengths: Sequence[int], spare: int, window: int | None) -> list[tuple[int, int, int, int, int]]:
    """Split sequences' keys into parts: (sequence, begin, end, index of the sequence's first part, its parts).

    lengths: each sequence's keys, at least 1. window: only this many newest keys are split, all where it is None. There
    are at most spare more parts than sequences, and a sequence's parts follow one another.
    """
    seen = [length if window is None else min(length, window) for length in lengths]
    most = max(SMALLEST_PART, _rounded(-(-sum(seen) // spare)))
    items: list[tuple[int, int, int, int, int]] = []
    for sequence, (length, count) in enumerate(zip(lengths, seen, strict=True)):
        first, parts = len(items), -(-count // most) if count > _SLACK * most else 1
        if parts > 1:
            own = _rounded(-(-count // parts))
            parts = -(-count // own)
        else:
            own = count
        for begin in range(length - count, length, own):
            items.append((sequence, begin, min(begin + own, length), first, parts))
    return items


def _rounded(count: int) -> int:
    return -(-count // _PART_MULTIPLE) * _PART_MULTIPLE


def layout(spans: Sequence[Span], windows: Sequence[int | None], spare: int) -> list[int]:
    """A step of one-token sequences as the kernel reads it: a header, each window's items, all sequences' KV blocks.

    The header says where the KV blocks begin and then, for each window, how many items there are. Each window has room
    for len(spans) + spare items, but for the last one, whose room ends with its items. An item is a part of a sequence's
    keys: sequence, first key, key behind the last, newest key, the sequence's first item, its number of items, its first
    KV block's index among all KV blocks, 0.
    """
    lengths = [span.end for span in spans]
    starts, blocks = list[int](), list[int]()
    for span in spans:
        starts.append(len(blocks))
        blocks += span.blocks
    header, items = [0] * HEADER, list[int]()
    for place, window in enumerate(windows):
        items += [0] * (place * (len(spans) + spare) * FIELDS - len(items))
        found = split_keys(lengths, spare, window)
        header[1 + place] = len(found)
        for sequence, begin, end, first, parts in found:
            items += (sequence, begin, end, lengths[sequence] - 1, first, parts, starts[sequence], 0)
    header[0] = HEADER + len(items)
    return header + items + blocks


class DecodeAttention:
    """Attention of one new token for each sequence in CUDA graphs, whose tables always lie in the same memory."""

    def __init__(
        self,
        kinds: Collection[Kind],
        largest: int,
        most_blocks: int,
        device: torch.device,
    ) -> None:
        """kinds: the layers'. largest: sequences that a step may have; most_blocks: KV blocks that each may have."""
        # Triton is not installed without CUDA.
        from server.engine.runtime.attention.decode_kernel import Partials, attend_newest

        self._attend: Callable[..., torch.Tensor] = attend_newest
        self._windows = list(dict.fromkeys(kind.options.window for kind in kinds))
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._spare = -(-_SPARE * processors // min(kind.kv_heads for kind in kinds))
        if len(self._windows) >= HEADER:
            raise ValueError(f"layers have {len(self._windows)} different windows")
        items = largest + self._spare
        size = HEADER + len(self._windows) * items * FIELDS + largest * most_blocks
        self._numbers = torch.zeros(size, dtype=torch.int32, device=device)
        self._partials = Partials(
            items,
            max(kind.kv_heads for kind in kinds),
            max(kind.heads for kind in kinds),
            max(kind.dim for kind in kinds),
            device,
        )

    def plan(self, spans: Sequence[Span]) -> None:
        """Lay out a step; spans are as many as the graph's sequences."""
        # A copy from memory that is not pinned would wait for the step that is running.
        numbers = torch.tensor(layout(spans, self._windows, self._spare), dtype=torch.int32, pin_memory=True)
        self._numbers[: len(numbers)].copy_(numbers, non_blocking=True)

    def attend(
        self,
        cache: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        rotary: RotaryEmbedding | None = None,
        tile: int = 0,
    ) -> torch.Tensor:
        """Write the step's keys and values into a layer's cache and attend, see decode_kernel.attend_newest()."""
        place, items = self._windows.index(options.window), query.shape[0] + self._spare
        first = HEADER + place * items * FIELDS
        step = self._numbers, first, 1 + place, items
        return self._attend(cache, query, key, value, *step, self._partials, options, rotary, tile)


# How far a step's outputs may be from other kernels', by rounding, in the norm of all of them.
_TOLERANCE = 0.02


def disagreement(
    decode: DecodeAttention,
    reference: AttentionBackend,
    cache: torch.Tensor,
    layer: int,
    kind: Kind,
) -> str | None:
    """How decode's outputs differ from reference's by more than rounding, in words; None where they do not.

    Tries a step without a rotary embedding and one with it and norms. cache is reference's for the layer, [blocks, 2,
    block_size, kv_heads, dim], which is left filled with zeros; its last block is not used.
    """
    block_size, room = cache.shape[2], cache.shape[0] - 1
    spans: list[Span] = []
    used = 0
    for length in (1, block_size + 1, 2 * SMALLEST_PART + 3):
        own = range(used, min(used + -(-length // block_size), room))
        if own:
            end = min(length, len(own) * block_size)
            spans.append(Span(len(spans), end - 1, 1, tuple(own)))
            used = own.stop

    def made(heads: int) -> torch.Tensor:
        return torch.randn(len(spans), heads, kind.dim, dtype=cache.dtype, device=cache.device)

    slots = torch.tensor([s.blocks[-1] * block_size + s.start % block_size for s in spans], device=cache.device)
    decode.plan(spans)
    reference.begin(Batch(slots, slots, slots, slots, tuple(spans), len(spans)))
    for rotary in (None, _any_rotary(cache.new_empty(len(spans), kind.dim))):
        query, key, value = made(kind.heads), made(kind.kv_heads), made(kind.kv_heads)
        cache[:used].normal_()
        found = decode.attend(cache, query, key, value, kind.options, rotary)
        written = cache.transpose(1, 2).flatten(0, 1)[slots]
        if rotary is not None:
            query, key = rotary.apply(query, key)
        expected = reference.attend(layer, query, key, value, kind.options)
        cache[:used].zero_()
        rounding = 0.0 if rotary is None else _TOLERANCE
        if not torch.equal(written[:, 1], value) or not relative_error(written[:, 0], key) <= rounding:
            return "other keys and values are in the cache"
        error = relative_error(found, expected)
        if not error < _TOLERANCE:
            return f"outputs are off by {error:.1e}"
    return None


def _any_rotary(like: torch.Tensor) -> RotaryEmbedding:
    """A rotary embedding by random angles, with norms, for the tokens and of the dtype of like [T, dim]."""
    tokens, dim = like.shape
    angles = torch.randn(tokens, dim // 2, device=like.device).repeat(1, 2)
    cos, sin = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
    return RotaryEmbedding(cos, sin, (torch.randn_like(like[0]), torch.randn_like(like[0])), eps=1e-6, offset=1.0)
