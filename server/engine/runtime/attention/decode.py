"""Decode steps' attention by our own kernel: which part of which sequence's keys each of its programs takes.

FlashInfer's kernels for such steps take two launches, and a third one writes the new keys and values; with few sequences
these are bound by nothing but latency.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from server.engine.runtime.attention.base import AttentionBackend, AttentionOptions
from server.engine.runtime.attention.flashinfer_graphs import Kind
from server.engine.runtime.attention.rotation import Rotation
from server.engine.runtime.batch import Batch, Span
from server.engine.runtime.trials import relative_error

SMALLEST_PART = 64
"""A sequence's keys are shared out only in parts of at least so many: adding parts up takes longer than these few."""
# Parts are multiples of this.
_UNIT = 64
# Programs that sequences may be shared out among, beside one for each, in times the device's processors.
_SPARE = 4
# A sequence that is longer than a part by less is not cut.
_SLACK = 1.25
HEADER = 8
FIELDS = 8


def share_out(lengths: Sequence[int], spare: int, window: int | None) -> list[tuple[int, int, int, int, int]]:
    """Parts of sequences' keys, at most spare more than sequences: (sequence, begin, end, first part's index, parts).

    lengths: keys of each, 1 and more. With a window only the newest so many count. A sequence's parts follow one another.
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
    return -(-count // _UNIT) * _UNIT


def layout(spans: Sequence[Span], windows: Sequence[int | None], spare: int) -> list[int]:
    """A step of one-token sequences as the kernel reads it.

    A header: where the sequences' blocks begin, then for each window how many items there are. From the header on, for
    each window, room for len(spans) + spare items: sequence, first key, key behind the last, newest key, the first item
    of the sequence, its items, its first block's place among all blocks, 0. The blocks follow the last window's items.
    """
    lengths = [span.end for span in spans]
    starts, blocks = list[int](), list[int]()
    for span in spans:
        starts.append(len(blocks))
        blocks += span.blocks
    header, items = [0] * HEADER, list[int]()
    for place, window in enumerate(windows):
        items += [0] * (place * (len(spans) + spare) * FIELDS - len(items))
        found = share_out(lengths, spare, window)
        header[1 + place] = len(found)
        for sequence, begin, end, first, parts in found:
            items += (sequence, begin, end, lengths[sequence] - 1, first, parts, starts[sequence], 0)
    header[0] = HEADER + len(items)
    return header + items + blocks


class DecodeAttention:
    """Steps of one new token for each sequence, as CUDA graphs see them: their tables lie in the same memory always."""

    def __init__(
        self,
        kinds: Collection[Kind],
        largest: int,
        most_blocks: int,
        device: torch.device,
    ) -> None:
        """kinds: the layers'. largest: the most sequences of a step; most_blocks: of each."""
        # Triton is not there without CUDA.
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
        # From other memory than this the copy would wait for the step that is running.
        numbers = torch.tensor(layout(spans, self._windows, self._spare), dtype=torch.int32, pin_memory=True)
        self._numbers[: len(numbers)].copy_(numbers, non_blocking=True)

    def attend(
        self,
        cache: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        rotation: Rotation | None = None,
        tile: int = 0,
    ) -> torch.Tensor:
        """Write the step's keys and values into a layer's cache and attend, see decode_kernel.attend_newest()."""
        place, items = self._windows.index(options.window), query.shape[0] + self._spare
        first = HEADER + place * items * FIELDS
        step = self._numbers, first, 1 + place, items
        return self._attend(cache, query, key, value, *step, self._partials, options, rotation, tile)


# A step's outputs may differ from other kernels' by rounding, in the norm of all.
_TOLERANCE = 0.02


def disagreement(
    decode: DecodeAttention,
    reference: AttentionBackend,
    cache: torch.Tensor,
    layer: int,
    kind: Kind,
) -> str | None:
    """How steps in reference's cache differ from what reference computes there, in words; leaves zeros in the cache.

    One as it is, one whose queries and keys are normalised and rotated.

    cache: the layer's, [blocks, 2, block_size, kv_heads, dim]; its last block is not used.
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
    for rotation in (None, _any_rotation(cache.new_empty(len(spans), kind.dim))):
        query, key, value = made(kind.heads), made(kind.kv_heads), made(kind.kv_heads)
        cache[:used].normal_()
        found = decode.attend(cache, query, key, value, kind.options, rotation)
        written = cache.transpose(1, 2).flatten(0, 1)[slots]
        if rotation is not None:
            query, key = rotation.rotated(query, key)
        expected = reference.attend(layer, query, key, value, kind.options)
        cache[:used].zero_()
        rounding = 0.0 if rotation is None else _TOLERANCE
        if not torch.equal(written[:, 1], value) or not relative_error(written[:, 0], key) <= rounding:
            return "other keys and values are in the cache"
        error = relative_error(found, expected)
        if not error < _TOLERANCE:
            return f"outputs are off by {error:.1e}"
    return None


def _any_rotation(like: torch.Tensor) -> Rotation:
    """By random angles, with norms, for as many tokens and of the same dtype as like [T, dim]."""
    tokens, dim = like.shape
    angles = torch.randn(tokens, dim // 2, device=like.device).repeat(1, 2)
    cos, sin = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
    return Rotation(cos, sin, (torch.randn_like(like[0]), torch.randn_like(like[0])), eps=1e-6, offset=1.0)
