"""Attention of all steps on CUDA by our own kernels, over a cache in 16 bits or in 8, and of long chunks by FlashInfer.

A step's one-token sequences go to the decode kernels, its chunks to the chunk kernel. FlashInfer's kernels are faster for
long chunks, but they read no cache in 8 bits with a scale for each token and head, and take minutes to compile. So they
are loaded while the engine runs already, and take over once they have computed the same as ours.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from server.engine.runtime.attention.base import AttentionOptions, LayerShape
from server.engine.runtime.attention.flashinfer.prefill import (
    LONG_CHUNKS,
    FlashInferPrefill,
    is_plain,
    load_in_background,
)
from server.engine.runtime.attention.graph_backend import ROTARY_FROM, DecodeForm, GraphBackend
from server.engine.runtime.attention.kernels import chunk_items
from server.engine.runtime.attention.kernels.decode.attention import DecodeAttention
from server.engine.runtime.attention.kernels.decode.compiled_kernel import can_attend
from server.engine.runtime.attention.kernels.decode.key_parts import Room
from server.engine.runtime.attention.kernels.decode.trial import compile_forms, disagreement
from server.engine.runtime.attention.kernels.instances import Shared
from server.engine.runtime.attention.kernels.kv_cache import Kind, LayerCache
from server.engine.runtime.attention.latent import LatentHeads
from server.engine.runtime.attention.latent_chunks import LongChunk, long_chunks
from server.engine.runtime.attention.rotary import RotaryEmbedding
from server.engine.runtime.attention.whole_images import ImageQueries, attend_again, image_queries
from server.engine.runtime.batch import Batch, Spans
from server.engine.runtime.trials import failure

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Launches:
    """Room that the launches of a step have."""

    sequences: int
    """One-token sequences; 0: no such launch."""
    chunks: dict[int, tuple[torch.Tensor, int]]
    """chunk_items.layout() on the device, and items that there is room for, by the tokens of one; empty: no such launch."""


class CudaBackend(GraphBackend):
    """A LayerCache of num_blocks + 1 KV blocks for each layer; the last one is scratch.

    A graph's launches are fixed by its size; a replay reads what the latest plan laid out.
    """

    def __init__(
        self,
        shapes: list[LayerShape],
        options: list[AttentionOptions],
        num_blocks: int,
        block_size: int,
        cache_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """cache_dtype: bfloat16, float16, float8_e4m3fn or int8."""
        from server.engine.runtime.attention.kernels.chunk_kernel import PartialSums, attend_chunks, tokens_per_item
        from server.engine.runtime.attention.kernels.kv_write import quantize_kv, write_kv

        self._attend_chunks, self._write_kv, self._quantize_kv = attend_chunks, write_kv, quantize_kv
        self._block_size = block_size
        self._device = device
        self.scratch_block = num_blocks
        self._cache = [LayerCache.zeros(s, num_blocks + 1, block_size, cache_dtype, device) for s in shapes]
        self._kinds = [Kind.of(shape, option) for shape, option in zip(shapes, options, strict=True)]
        self._tokens_per_item = {kind: tokens_per_item(kind, device) for kind in self._kinds}
        self._split_keys = True
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        room = chunk_items.chunk_room(processors, max(kind.groups for kind in self._kinds))
        self._partial: PartialSums | None = PartialSums(room, self._kinds, device)
        # The kinds for which decode graphs attend by the compiled kernel, once it has been tried.
        self._compiled: Collection[Kind] = ()
        self._prefill: FlashInferPrefill | None = None
        self._long: FlashInferPrefill | None = None
        self._image_queries: Sequence[ImageQueries] = ()
        # Made for the first steps, and for good when graphs are set up, which read its tables.
        self._decode: DecodeAttention | None = None
        self._is_final = False
        self._graph_chunks: dict[int, torch.Tensor] = {}
        self._launches = _Launches(0, {})
        self._newest_only = False
        # Whether tokens of a decode graph may be of one sequence.
        self._shared = False
        # A step of latents that may have long chunks, until its first layer attends; then these chunks.
        self._batch: Batch | None = None
        self._expanded: list[LongChunk] = []
        self._slots = torch.empty(0, dtype=torch.int64, device=device)

    def begin(self, batch: Batch) -> None:
        singles = batch.num_single
        self._plan_singles(batch.spans, singles, singles)
        chunks: dict[int, tuple[torch.Tensor, int]] = {}
        if len(batch.spans) > singles:
            chunks = self._chunk_launches(batch.spans, slice(singles, None))
        self._launches = _Launches(singles, chunks)
        self._write_to(batch.slots)
        if all(kind.is_latent and is_plain(kind.options) for kind in self._kinds):
            self._batch = batch
        if self._prefill is not None and batch.num_tokens - singles >= LONG_CHUNKS:
            self._long = self._prefill
            self._long.plan(batch.spans, singles)
        self._image_queries = image_queries(batch)

    def load_long_chunks(self) -> None:
        """Load FlashInfer's kernels for long chunks in a thread. Call once no more graphs are captured."""
        if self._cache[0].scales is None:
            load_in_background(self._kinds, self._block_size, self._cache[0].data.dtype, self._device, self._use)

    def _use(self, prefill: FlashInferPrefill) -> None:
        # A step that has begun keeps what it has planned.
        self._prefill = prefill

    def _plan_singles(self, spans: Spans, singles: int, sequences: int) -> None:
        decode = self._decode_for(len(spans), int(spans.counts.max(initial=1)))
        decode.plan_singles(spans, singles, sequences)

    @property
    def _chunk_room(self) -> Room | None:
        return None if self._partial is None else self._partial.room

    def _chunk_launches(self, spans: Spans, places: slice | list[int]) -> dict[int, tuple[torch.Tensor, int]]:
        """_Launches.chunks of the spans at these places."""
        return {
            tokens: (numbers.to(self._device, non_blocking=True), len(numbers) - 1)
            for tokens, numbers in self._chunk_items(spans, places).items()
        }

    def _chunk_items(self, spans: Spans, places: slice | list[int]) -> dict[int, torch.Tensor]:
        """chunk_items.layout() of the spans at these places, in pinned memory, by the tokens of an item."""
        columns = spans.first_rows[places], spans.lengths[places], spans.starts[places], spans.rows[places]
        # A copy from memory that is not pinned would wait for the step that is running.
        return {
            tokens: torch.from_numpy(chunk_items.layout(*columns, tokens, self._chunk_room)).pin_memory()
            for tokens in set(self._tokens_per_item.values())
        }

    def _decode_for(self, sequences: int, blocks: int) -> DecodeAttention:
        """The decode kernel's tables with room for `sequences` sequences of `blocks` KV blocks each.

        Raises RuntimeError if those that graphs read have less.
        """
        held = (0, 0) if self._decode is None else self._decode.room
        if self._decode is None or held[0] < sequences or held[1] < blocks:
            if self._is_final:
                raise RuntimeError(f"graphs have room for {held[0]} sequences of {held[1]} KV blocks")
            room = max(held[0], sequences), max(held[1], blocks)
            kinds = list(dict.fromkeys(self._kinds))
            scratch, device = self.scratch_block, self._device
            self._decode = DecodeAttention(kinds, *room, scratch, device, self._split_keys, compiled=self._compiled)
        return self._decode

    def set_up_graphs(
        self, max_model_len: int, max_num_seqs: int, split_keys: bool, forms: Collection[DecodeForm] = ()
    ) -> None:
        """Do as GraphBackend says. With split_keys the compiled kernel attends, where it computes what Triton's does."""
        room = max_num_seqs, -(-max_model_len // self._block_size)
        self._split_keys, self._decode, self._is_final = split_keys, None, False
        if not split_keys:
            self._partial = None
        cache = self._cache[0]
        if split_keys and cache.scales is None:
            own = cache.data.dtype, self._block_size, self._device
            self._compiled = [kind for kind in dict.fromkeys(self._kinds) if can_attend(kind, *own)]
            failed = failure(lambda: self._try_decode(self._decode_for(*room), forms))
            if failed is not None and self._compiled:
                logger.warning(
                    "decode steps attend by Triton's kernel, more slowly: the compiled one fails: %s", failed
                )
                self._compiled, self._decode = (), None
                failed = failure(lambda: self._try_decode(self._decode_for(*room), forms))
            if failed is not None:
                raise RuntimeError(f"decode steps cannot attend: {failed}")
        self._decode_for(*room)
        self._is_final = True

    def _try_decode(self, decode: DecodeAttention, forms: Collection[DecodeForm]) -> None:
        """Raise what decode's kernels raise, and ValueError if they compute something else than the chunk kernel."""
        firsts = {kind: self._kinds.index(kind) for kind in self._kinds}
        compile_forms(decode, [(self._cache[n].data, kind, self.sinks.get(n)) for kind, n in firsts.items()], forms)
        norms = not forms or any(form.norms for form in forms)
        for kind, layer in firsts.items():
            wrong = disagreement(decode, self, self._cache[layer].data, layer, kind, norms)
            if wrong is not None:
                raise ValueError(wrong)

    def plan_decode_graph(self, spans: Spans, size: int, shared: bool = False) -> None:
        self._decode_for(size, 1).plan(spans, size, shared)

    def advance_decode_graph(self, inputs: torch.Tensor, tokens: torch.Tensor) -> bool:
        return self._decode is not None and self._decode.advance(inputs, tokens, self._block_size)

    def begin_decode_graph(self, slots: torch.Tensor, shared: bool = False) -> None:
        self._write_to(slots)
        self._newest_only, self._shared = True, shared

    def plan_mixed_graph(self, spans: Spans, size: int, sequences: int) -> _Launches:
        singles = int((spans.lengths == 1).sum())
        self._plan_singles(spans, singles, sequences)
        chunks = {}
        for tokens, numbers in self._chunk_items(spans, slice(singles, None)).items():
            most = chunk_items.most_items(size, sequences, tokens, self._chunk_room)
            if tokens not in self._graph_chunks:
                # The graph of most tokens is captured first, and all share its memory; others may have more sequences.
                most_sequences = self._decode_for(sequences, 1).room[0]
                rows = 1 + chunk_items.most_items(size, most_sequences, tokens, self._chunk_room)
                room = torch.zeros(rows, chunk_items.FIELDS, dtype=torch.int32, device=self._device)
                self._graph_chunks[tokens] = room
            held = self._graph_chunks[tokens]
            held[: len(numbers)].copy_(numbers, non_blocking=True)
            chunks[tokens] = held, most
        return _Launches(sequences, chunks)

    def begin_mixed_graph(self, slots: torch.Tensor, plan: _Launches) -> None:
        self._write_to(slots)
        self._launches = plan

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        cache, decode, sinks = self._cache[layer], self._decode, self.sinks.get(layer)
        assert decode is not None
        shared = Shared.NO
        if self._shared:
            shared = Shared.IN_ROWS if cache.scales is None else Shared.WRITTEN
        elif self._newest_only and not self._split_keys:
            # Tokens of a prompt, too, are one-token sequences of such a graph. They find each other in the cache, in the
            # order of their keys, so that a token's sums do not depend on which are in its launch.
            shared = Shared.WRITTEN
        if not self._newest_only or shared is Shared.WRITTEN:
            self._write(cache, key, value)
        if self._newest_only:
            return decode.attend(cache, query, key, value, options, sinks=sinks, shared=shared)
        out = query.new_empty(*query.shape[:2], value.shape[2])
        launches = self._launches
        if launches.sequences:
            decode.attend(cache, query, key, value, options, sinks=sinks, sequences=launches.sequences, out=out)
        kind = self._kinds[layer]
        if launches.chunks and self._long is not None and self._long.takes(kind):
            self._long.attend(kind, query, cache.data, out)
        elif launches.chunks:
            numbers, items = launches.chunks[self._tokens_per_item[kind]]
            tables = decode.tables.blocks
            self._attend_chunks(cache, query, out, numbers, items, tables, options, sinks, self._partial)
        causal = self.windowed_images and options.window is None
        if self._image_queries and cache.scales is None and not causal:
            own = None if sinks is None else sinks.unsqueeze(-1)
            pages, width = cache.data, value.shape[2]
            attend_again(
                self._image_queries,
                lambda blocks: (pages[blocks, 0], pages[blocks, -1, ..., :width]),
                query,
                out,
                options,
                own,
            )
        return out

    def attend_latent(
        self, layer: int, query: torch.Tensor, latent: torch.Tensor, heads: LatentHeads, options: AttentionOptions
    ) -> torch.Tensor:
        """See AttentionBackend. Outside graphs long chunks attend over expanded keys and values."""
        if self._batch is not None:
            self._expand_long(self._batch, heads)
        if not self._expanded:
            return super().attend_latent(layer, query, latent, heads, options)
        cache = self._cache[layer]
        if self._launches.sequences or self._launches.chunks:
            out = super().attend_latent(layer, query, latent, heads, options)
        else:
            self._write(cache, latent, latent)
            out = query.new_empty(*query.shape[:2], heads.sizes.width)
        for chunk in self._expanded:
            chunk.attend(query, latent, cache.data, heads, options, out)
        return out

    def _expand_long(self, batch: Batch, heads: LatentHeads) -> None:
        """Take the chunks that attend over expanded keys and values from those that the chunk kernel attends for."""
        self._batch = None
        if self._image_queries:
            return
        assert self._decode is not None
        found = long_chunks(batch.spans, batch.num_single, heads, self._decode.tables.blocks)
        if found:
            self._expanded = list(found.values())
            rest = [place for place in range(batch.num_single, len(batch.spans)) if place not in found]
            chunks = self._chunk_launches(batch.spans, rest) if rest else {}
            self._launches = _Launches(self._launches.sequences, chunks)

    def _write(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        if cache.scales is None:
            self._write_kv(cache.data, key, value, self._slots)
        else:
            self._quantize_kv(cache.data, cache.scales, key, value, self._slots)

    def attend_rotary(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        rotary: RotaryEmbedding,
        tile: int = 0,
    ) -> torch.Tensor:
        if not self.tiles_result(query.shape[0]) or rotary.cos.shape[-1] != query.shape[-1]:
            return super().attend_rotary(layer, query, key, value, options, rotary, tile)
        assert self._decode is not None
        sinks = self.sinks.get(layer)
        return self._decode.attend(self._cache[layer], query, key, value, options, rotary, tile, sinks)

    def tiles_result(self, tokens: int) -> bool:
        return self._newest_only and self._split_keys and not self._shared and tokens >= ROTARY_FROM

    def _write_to(self, slots: torch.Tensor) -> None:
        self._slots = slots
        self._newest_only = self._shared = False
        self._long, self._image_queries = None, ()
        self._batch, self._expanded = None, []
