"""FlashInfer's paged attention for CUDA: a plan per step and kind of layer, a launch per layer.

FA2 kernels; prompts' chunks may go to others (FA3), in a launch beside that of the one-token sequences.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from server.engine.runtime.attention.base import AttentionBackend, AttentionOptions, LayerShape
from server.engine.runtime.attention.flashinfer_graphs import MixedWrappers
from server.engine.runtime.batch import Batch, Span

# FlashInfer's launches fill the device with two blocks a processor, of at most this many queries each.
_BLOCKS_PER_PROCESSOR = 2
_QUERIES_PER_BLOCK = 128
_SLACK_BYTES = 16 * 2**20
LONG_CHUNKS = 256
"""From so many tokens in a step's chunks on they are worth a launch of their own, by other kernels."""


@dataclass(frozen=True)
class _Kind:
    """Layers that attend alike share a plan."""

    heads: int
    kv_heads: int
    dim: int
    options: AttentionOptions


@dataclass
class _Pages:
    """Where the batch's keys are, as FlashInfer wants it: int32 on the host."""

    rows: torch.Tensor
    """[sequences + 1]: where each sequence's queries begin."""
    starts: torch.Tensor
    """[sequences + 1]: where each sequence's blocks begin in blocks."""
    blocks: torch.Tensor
    last: torch.Tensor
    """[sequences]: tokens in each sequence's last block."""


_Part = tuple[slice, Any]
"""Rows of a step's batch, and FlashInfer's wrapper that is planned for them."""


class FlashInferBackend(AttentionBackend):
    """One tensor [num_blocks + 1, 2, block_size, kv_heads, dim] per layer, keys and values; the last block is scratch.

    A step of one-token sequences only may run as a graph: begin_graph() fixes the
    number of sequences, and replays read what the latest plan_graph() of that number laid out.
    """

    def __init__(
        self,
        shapes: list[LayerShape],
        options: list[AttentionOptions],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        long_chunks: str | None = None,
    ) -> None:
        """long_chunks: FlashInfer's name of the kernels for LONG_CHUNKS tokens and more of plain layers, see is_plain()."""
        # Neither package is there without CUDA.
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        from server.engine.runtime.attention.kv_write import write_kv

        self._write_kv = write_kv
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self.scratch_block = num_blocks
        self._cache = [
            torch.zeros(num_blocks + 1, 2, block_size, s.kv_heads, s.key_dim, dtype=dtype, device=device)
            for s in shapes
        ]
        self._kinds = [_Kind(s.heads, s.kv_heads, s.key_dim, o) for s, o in zip(shapes, options, strict=True)]
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._workspace = self._room(
            max(
                _partial_bytes(kind, max(1, _BLOCKS_PER_PROCESSOR * processors // kind.kv_heads) * _QUERIES_PER_BLOCK)
                for kind in self._kinds
            )
        )

        def wrappers(kinds: list[_Kind], backend: str) -> dict[_Kind, Any]:
            return {
                kind: BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=backend) for kind in kinds
            }

        kinds = list(dict.fromkeys(self._kinds))
        self._mixed = wrappers(kinds, "fa2")
        self._long = wrappers([kind for kind in kinds if is_plain(kind.options)], long_chunks) if long_chunks else {}
        self._graphs: dict[int, dict[_Kind, Any]] = {}
        self._mixed_graphs = MixedWrappers(kinds, self._workspace, block_size)
        self._split_keys = True
        self._most_blocks = num_blocks
        self._parts: dict[_Kind, list[_Part]] = {}
        self._slots = torch.empty(0, dtype=torch.int64, device=device)
        self._next_layer = 0

    def begin(self, batch: Batch) -> None:
        singles, count = batch.num_single, len(batch.spans)

        @functools.cache
        def pages(first: int, last: int) -> _Pages:
            return _pages(list(batch.spans[first:last]), self._block_size)

        long = batch.num_tokens - singles >= LONG_CHUNKS
        self._parts = {}
        for kind, wrapper in self._mixed.items():
            chunks = self._long.get(kind) if long else None
            parts = self._parts[kind] = []
            # One-token sequences come first, a row each.
            if chunks is None or singles:
                last, rows = (count, slice(None)) if chunks is None else (singles, slice(singles))
                parts.append((rows, self._plan_chunks(kind, wrapper, pages(0, last))))
            if chunks is not None:
                parts.append((slice(singles, None), self._plan_chunks(kind, chunks, pages(singles, count))))
        self._write_to(batch.slots)

    def _plan_chunks(self, kind: _Kind, wrapper: Any, pages: _Pages, split_keys: bool = True) -> Any:
        tables = pages.rows, pages.starts, pages.blocks, pages.last
        self._plan(kind, wrapper, tables, split_keys, causal=True)
        return wrapper

    def _plan(
        self, kind: _Kind, wrapper: Any, tables: tuple[torch.Tensor, ...], split_keys: bool, **others: Any
    ) -> None:
        wrapper.plan(
            *tables,
            kind.heads,
            kind.kv_heads,
            kind.dim,
            self._block_size,
            sm_scale=kind.options.scaling,
            window_left=_window_left(kind.options),
            logits_soft_cap=kind.options.softcap,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            disable_split_kv=not split_keys,
            **others,
        )

    def set_up_graphs(self, max_model_len: int, split_keys: bool) -> None:
        """Before the first plan_graph(): how long sequences get, in tokens; whether a sequence's keys may be shared out.

        Sharing keys out among blocks of the device goes by how many and how long the step's sequences are.
        """
        self._most_blocks = -(-max_model_len // self._block_size)
        self._split_keys = split_keys

    def begin_graph(self, slots: torch.Tensor, wrappers: dict[Any, Any] | None = None) -> None:
        """Make attend() use a graph's plan: that for len(slots) one-token sequences, or what plan_mixed_graph() gave.

        slots is the buffer the graph will read.
        """
        wrappers = self._graphs[slots.shape[0]] if wrappers is None else wrappers
        self._parts = {kind: [(slice(None), wrapper)] for kind, wrapper in wrappers.items()}
        self._write_to(slots)

    def plan_mixed_graph(self, spans: list[Span], size: int, sequences: int) -> dict[Any, Any]:
        """Lay out a step for the graph of size tokens and so many sequences; gives begin_graph()'s wrappers.

        The first plan of a size must have size tokens. No sequence is longer than flashinfer_graphs.LONGEST.
        """
        pages = self._padded_pages(spans, sequences, 0)
        pages.rows = pages.rows.pin_memory()
        wrappers = self._mixed_graphs.of(size, sequences)
        for kind, wrapper in wrappers.items():
            self._plan_chunks(kind, wrapper, pages, split_keys=False)
        return wrappers

    def plan_graph(self, spans: list[Span], size: int) -> None:
        """Lay out a step of one-token sequences for the graph of size sequences; the rest are padding."""
        pages = self._padded_pages(spans, size, 1)
        wrappers = self._graphs.get(size) or self._new_graph_wrappers(size)
        for kind, wrapper in wrappers.items():
            self._plan(kind, wrapper, (pages.starts, pages.blocks, pages.last), self._split_keys)

    def _padded_pages(self, spans: list[Span], sequences: int, tokens: int) -> _Pages:
        """Pages of so many sequences, those beyond spans of so many tokens in the scratch block."""
        padding = Span(0, 0, tokens, (self.scratch_block,))
        pages = _pages(spans + [padding] * (sequences - len(spans)), self._block_size)
        # From other memory than this, or from the host, FlashInfer's copies would wait for the step that is running.
        pages.starts, pages.last = pages.starts.pin_memory(), pages.last.pin_memory()
        pages.blocks = pages.blocks.pin_memory().to(self._device, non_blocking=True)
        return pages

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        cache = self._cache[layer]
        self._write_kv(cache, key, value, self._slots)
        self._next_layer = layer + 1
        query = query.contiguous()
        out = torch.empty_like(query)
        for rows, wrapper in self._parts[self._kinds[layer]]:
            wrapper.run(query[rows], cache, out=out[rows])
        return out

    def attend_next(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        layer = self._next_layer
        return self.attend(layer, query, key, value, self._kinds[layer].options)

    def _room(self, partial_bytes: int) -> torch.Tensor:
        return torch.zeros(partial_bytes + _SLACK_BYTES, dtype=torch.uint8, device=self._device)

    def _write_to(self, slots: torch.Tensor) -> None:
        self._slots = slots
        self._next_layer = 0

    def _new_graph_wrappers(self, size: int) -> dict[_Kind, Any]:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        def buffer(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, device=self._device)

        # The largest graph comes first; the others share what it needed.
        need = max(_partial_bytes(kind, _graph_rows(kind, size)) for kind in self._kinds)
        if need > self._workspace.numel():
            self._workspace = self._room(need)
        tables = buffer(size * self._most_blocks)
        self._graphs[size] = {
            kind: BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=buffer(size + 1),
                # Sequences share blocks, so their tables together may name more than there are.
                paged_kv_indices_buffer=tables,
                paged_kv_last_page_len_buffer=buffer(size),
                backend="fa2",
            )
            for kind in self._mixed
        }
        return self._graphs[size]


def _partial_bytes(kind: _Kind, rows: int) -> int:
    """What rows of queries need whose keys are shared out: float32 outputs and a sum for each head."""
    return rows * kind.heads * (kind.dim + 1) * 4


def _graph_rows(kind: _Kind, size: int) -> int:
    """Rows of queries for which a graph of size sequences makes room; its blocks take 16, 64 or 128 of them."""
    group = kind.heads // kind.kv_heads
    tile = 16 if group <= 16 else 64 if group <= 64 else _QUERIES_PER_BLOCK
    return (-(-size * group // tile) + size) * tile


def is_plain(options: AttentionOptions) -> bool:
    """Whether a layer attends to all keys, without a cap: others gain little from kernels for long chunks, or have none."""
    return options.window is None and options.softcap is None


def _window_left(options: AttentionOptions) -> int:
    """FlashInfer counts the keys before the query; -1 is no window."""
    return -1 if options.window is None else options.window - 1


def _pages(spans: list[Span], block_size: int) -> _Pages:
    rows, starts = [0], [0]
    blocks: list[int] = []
    last: list[int] = []
    for span in spans:
        rows.append(rows[-1] + span.length)
        blocks.extend(span.blocks)
        starts.append(len(blocks))
        last.append((span.end - 1) % block_size + 1)
    tensors = (torch.tensor(values, dtype=torch.int32) for values in (rows, starts, blocks, last))
    return _Pages(*tensors)
