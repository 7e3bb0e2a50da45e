"""FlashInfer's paged attention for CUDA: a plan per step and kind of layer, a launch per layer.

The one-token sequences of a step go to FlashInfer's FA2 kernels. Its chunks may go to the FA3 kernels, in a launch of
their own. Decode graphs attend by our own kernels (kernels/decode/).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from server.engine.runtime.attention.base import AttentionOptions, LayerShape
from server.engine.runtime.attention.flashinfer.graphs import (
    LONGEST,
    QUERIES_PER_BLOCK,
    DecodeWrappers,
    MixedWrappers,
    partial_bytes,
    workspace,
)
from server.engine.runtime.attention.flashinfer.page_tables import Padding, PageTables, page_tables
from server.engine.runtime.attention.graph_backend import DecodeForm, GraphBackend, HostLayout
from server.engine.runtime.attention.kernels.decode.attention import DecodeAttention
from server.engine.runtime.attention.kernels.decode.compiled_kernel import can_attend
from server.engine.runtime.attention.kernels.decode.trial import compile_forms, disagreement
from server.engine.runtime.attention.kernels.instances import Shared
from server.engine.runtime.attention.kernels.kv_cache import Kind, LayerCache
from server.engine.runtime.attention.rotary import RotaryEmbedding
from server.engine.runtime.attention.whole_images import ImageQueries, attend_again, image_queries
from server.engine.runtime.batch import Batch, Spans
from server.engine.runtime.trials import failure

logger = logging.getLogger(__name__)

# FlashInfer's launches fill the device with two thread blocks for each multiprocessor.
_BLOCKS_PER_PROCESSOR = 2
LONG_CHUNKS = 256
"""Tokens of a step's chunks from which on a second launch, of the FA3 kernels, takes less time than it saves."""

_Part = tuple[slice, Any]
"""Rows of a step's batch, and FlashInfer's wrapper that is planned for them."""


class FlashInferBackend(GraphBackend):
    """One tensor [num_blocks + 1, 2, block_size, kv_heads, dim] per layer, keys and values; the last block is scratch.

    A graph's launches are fixed by its size; a replay reads what the latest plan of that size laid out.
    """

    runs_compiled_layers = True
    longest_in_mixed_graph = LONGEST

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
        # Neither package is installed without CUDA.
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        from server.engine.runtime.attention.kernels.kv_write import write_kv

        self._write_kv = write_kv
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self.scratch_block = num_blocks
        self._cache = [
            torch.zeros(num_blocks + 1, 2, block_size, s.kv_heads, s.key_dim, dtype=dtype, device=device)
            for s in shapes
        ]
        self._kinds = [Kind(s.heads, s.kv_heads, s.key_dim, o) for s, o in zip(shapes, options, strict=True)]
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._workspace = workspace(
            max(
                partial_bytes(kind, max(1, _BLOCKS_PER_PROCESSOR * processors // kind.kv_heads) * QUERIES_PER_BLOCK)
                for kind in self._kinds
            ),
            device,
        )

        def wrappers(kinds: list[Kind], backend: str) -> dict[Kind, Any]:
            return {
                kind: BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=backend) for kind in kinds
            }

        kinds = list(dict.fromkeys(self._kinds))
        self._mixed = wrappers(kinds, "fa2")
        self._long = wrappers([kind for kind in kinds if is_plain(kind.options)], long_chunks) if long_chunks else {}
        self._decode: DecodeAttention | None = None
        self._decode_graphs = DecodeWrappers(kinds, self._workspace, num_blocks)
        self._mixed_graphs = MixedWrappers(kinds, self._workspace, block_size)
        self._planned = torch.cuda.Event()
        self._split_keys = True
        self._parts: dict[Kind, list[_Part]] = {}
        self._image_queries: Sequence[ImageQueries] = ()
        self._slots = torch.empty(0, dtype=torch.int64, device=device)
        self._newest_only: DecodeAttention | None = None
        # Whether tokens of a decode graph may be of one sequence.
        self._shared = False
        self._next_layer = 0

    def begin(self, batch: Batch) -> None:
        singles, count = batch.num_single, len(batch.spans)

        @functools.cache
        def tables(first: int, last: int) -> PageTables:
            return page_tables(batch.spans, self._block_size, slice(first, last))

        long = batch.num_tokens - singles >= LONG_CHUNKS
        self._parts = {}
        for kind, wrapper in self._mixed.items():
            chunks = self._long.get(kind) if long else None
            parts = self._parts[kind] = []
            # One-token sequences come first, a row each.
            if chunks is None or singles:
                last, rows = (count, slice(None)) if chunks is None else (singles, slice(singles))
                parts.append((rows, self._plan_chunks(kind, wrapper, tables(0, last))))
            if chunks is not None:
                parts.append((slice(singles, None), self._plan_chunks(kind, chunks, tables(singles, count))))
        self._write_to(batch.slots)
        self._image_queries = image_queries(batch)

    def _plan_chunks(self, kind: Kind, wrapper: Any, tables: PageTables, split_keys: bool = True) -> Any:
        given = tables.rows, tables.starts, tables.blocks, tables.last
        self._plan(kind, wrapper, given, split_keys, causal=True)
        return wrapper

    def _plan(
        self, kind: Kind, wrapper: Any, tables: tuple[torch.Tensor, ...], split_keys: bool, **others: Any
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

    def set_up_graphs(
        self, max_model_len: int, max_num_seqs: int, split_keys: bool, forms: Collection[DecodeForm] = ()
    ) -> None:
        """Do as GraphBackend says. With split_keys our own kernel attends, if it computes what FlashInfer's do."""
        most_blocks = -(-max_model_len // self._block_size)
        self._split_keys = split_keys
        self._decode_graphs = DecodeWrappers(list(self._mixed), self._workspace, most_blocks)
        if not split_keys:
            return
        compiled = [kind for kind in self._mixed if can_attend(kind, self._dtype, self._block_size, self._device)]
        failed = failure(lambda: self._load_decode(max_num_seqs, most_blocks, forms, compiled))
        if failed is not None and compiled:
            logger.warning("decode steps attend by the Triton kernel, more slowly: the compiled one fails: %s", failed)
            failed = failure(lambda: self._load_decode(max_num_seqs, most_blocks, forms, ()))
        if failed is not None:
            logger.warning("decode steps attend by FlashInfer's kernels, more slowly: our own fails: %s", failed)

    def _load_decode(
        self, sequences: int, most_blocks: int, forms: Collection[DecodeForm], compiled: Collection[Kind]
    ) -> None:
        """Use our own kernels for graphs. Raises what these raise, and ValueError if their results differ."""
        room = sequences, most_blocks, self.scratch_block
        decode = DecodeAttention(self._mixed, *room, self._device, compiled=compiled)
        firsts = [self._kinds.index(kind) for kind in self._mixed]
        compile_forms(decode, [(self._cache[n], self._kinds[n], self.sinks.get(n)) for n in firsts], forms)
        norms = not forms or any(form.norms for form in forms)
        for kind, layer in zip(self._mixed, firsts, strict=True):
            wrong = disagreement(decode, self, self._cache[layer], layer, kind, norms)
            if wrong is not None:
                raise ValueError(wrong)
        self._decode = decode

    def advance_decode_graph(self, inputs: torch.Tensor, tokens: torch.Tensor) -> bool:
        return self._decode is not None and self._decode.advance(inputs, tokens, self._block_size)

    def begin_decode_graph(self, slots: torch.Tensor, shared: bool = False) -> None:
        self._write_to(slots)
        self._shared = shared
        if self._decode is not None:
            self._newest_only = self._decode
        else:
            self._attend_by(self._decode_graphs.of(slots.shape[0]))

    def begin_mixed_graph(self, slots: torch.Tensor, plan: dict[Kind, Any]) -> None:
        self._write_to(slots)
        self._attend_by(plan)

    def _attend_by(self, wrappers: dict[Kind, Any]) -> None:
        self._parts = {kind: [(slice(None), wrapper)] for kind, wrapper in wrappers.items()}

    def plan_mixed_graph(self, spans: Spans, size: int, sequences: int) -> dict[Kind, Any]:
        tables = self._padded_tables(spans, sequences, 0)
        tables.rows = tables.rows.pin_memory()
        wrappers = self._mixed_graphs.of(size, sequences)
        with self._planning_graph():
            for kind, wrapper in wrappers.items():
                self._plan_chunks(kind, wrapper, tables, split_keys=False)
        return wrappers

    def host_layout(self, spans: Spans, size: int, shared: bool = False) -> HostLayout | None:
        if self._decode is None:
            return super().host_layout(spans, size, shared)
        return self._decode.host_layout(spans, size, shared)

    def plan_decode_graph(self, spans: Spans, size: int, shared: bool = False) -> None:
        if self._decode is not None:
            self._decode.plan(spans, size, shared)
            return
        tables = self._padded_tables(spans, size, 1)
        with self._planning_graph():
            for kind, wrapper in self._decode_graphs.of(size).items():
                self._plan(kind, wrapper, (tables.starts, tables.blocks, tables.last), self._split_keys)

    @contextmanager
    def _planning_graph(self) -> Iterator[None]:
        """Enter it to plan for a graph: FlashInfer copies each plan from the same pinned memory."""
        self._planned.synchronize()
        yield
        self._planned.record()

    def _padded_tables(self, spans: Spans, sequences: int, tokens: int) -> PageTables:
        """The tables of spans, followed by those of padding up to `sequences` sequences of `tokens` tokens each."""
        padding = Padding(sequences - len(spans), tokens, self.scratch_block)
        tables = page_tables(spans, self._block_size, padding=padding)
        # Copies from memory that is not pinned, which FlashInfer would make, wait for the step that is running.
        tables.starts, tables.last = tables.starts.pin_memory(), tables.last.pin_memory()
        tables.blocks = tables.blocks.pin_memory().to(self._device, non_blocking=True)
        return tables

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        if self._newest_only is not None:
            return self._attend_newest(self._newest_only, layer, query, key, value, None)
        cache = self._cache[layer]
        self._write_kv(cache, key, value, self._slots)
        self._next_layer = layer + 1
        query = query.contiguous()
        out = torch.empty_like(query)
        sinks = self.sinks.get(layer)
        for rows, wrapper in self._parts[self._kinds[layer]]:
            if sinks is None:
                wrapper.run(query[rows], cache, out=out[rows])
            else:
                _, sums = wrapper.run(query[rows], cache, out=out[rows], return_lse=True)
                _add_sinks(out[rows], sums, sinks)
        if self._image_queries:
            own = None if sinks is None else sinks.unsqueeze(-1)
            attend_again(
                self._image_queries, lambda blocks: (cache[blocks, 0], cache[blocks, 1]), query, out, options, own
            )
        return out

    def attend_next(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        layer = self._next_layer
        return self.attend(layer, query, key, value, self._kinds[layer].options)

    def attend_rotary_next(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotary: RotaryEmbedding, tile: int = 0
    ) -> torch.Tensor:
        if self._newest_only is None or self._shared:
            return super().attend_rotary_next(query, key, value, rotary, tile)
        return self._attend_newest(self._newest_only, self._next_layer, query, key, value, rotary, tile)

    def _attend_newest(
        self,
        decode: DecodeAttention,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary: RotaryEmbedding | None,
        tile: int = 0,
    ) -> torch.Tensor:
        self._next_layer = layer + 1
        cache, options = LayerCache(self._cache[layer], None), self._kinds[layer].options
        sinks, shared = self.sinks.get(layer), Shared.IN_ROWS if self._shared else Shared.NO
        return decode.attend(cache, query, key, value, options, rotary, tile, sinks, shared=shared)

    @property
    def applies_rotary(self) -> bool:
        return self._decode is not None

    def _write_to(self, slots: torch.Tensor) -> None:
        self._slots = slots
        self._newest_only, self._shared = None, False
        self._image_queries = ()
        self._next_layer = 0


def is_plain(options: AttentionOptions) -> bool:
    """Whether a layer attends to all keys, without a cap and without sinks.

    The other layers gain little from kernels for long chunks, or have no such kernels.
    """
    return options.window is None and options.softcap is None and not options.sinks


def _add_sinks(out: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor) -> None:
    """Add the effect of sinks [heads] to outputs [T, heads, dim], in place; sums [T, heads]: log2 of the weights' sums.

    A sink adds to the sum of the weights and to nothing else, so outputs are multiplied by the other keys' share of that
    sum.
    """
    out.mul_(torch.sigmoid(sums * math.log(2.0) - sinks).unsqueeze(-1))


def _window_left(options: AttentionOptions) -> int:
    """The window as FlashInfer counts it: keys in front of the query; -1 is no window."""
    return -1 if options.window is None else options.window - 1
