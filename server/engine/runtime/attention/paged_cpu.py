"""The CPU backend: attention in C++ that reads keys and values from the KV blocks in place."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nf4_kernels import cpu
from server.engine.runtime.attention.base import AttentionOptions, LayerShape
from server.engine.runtime.attention.latent import HeadSizes, LatentHeads
from server.engine.runtime.attention.sdpa import SdpaBackend
from server.engine.runtime.batch import Batch, Span
from server.engine.runtime.native import load_native

SOURCE = Path(__file__).with_name("paged_cpu.cpp")


class _Call(ctypes.Structure):
    """PagedAttention of paged_cpu.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value")),
        *((name, ctypes.c_int64) for name in ("query_token", "query_head", "key_token", "key_head")),
        *((name, ctypes.c_int64) for name in ("value_token", "value_head")),
        *((name, ctypes.c_void_p) for name in ("out", "key_cache", "value_cache", "slots", "tables", "spans")),
        *((name, ctypes.c_int64) for name in ("tokens", "singles", "sequences", "table_width", "block_size")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "key_dim", "value_dim", "value_row", "window")),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
        ("amx", ctypes.c_int32),
    )


@dataclass(frozen=True)
class _Parts:
    """The sequences of a batch by how latent layers attend: with latents, or with expanded keys and values."""

    rows: torch.Tensor | None
    """int64: the batch's rows of those that attend with latents; None: there are none."""
    spans: torch.Tensor
    """Of _Call: those that attend with latents, in these rows."""
    expanded: list[int]
    """The places of the other sequences."""

    @classmethod
    def of(cls, batch: Batch, heads: LatentHeads) -> _Parts:
        """Divide a batch by what takes fewer operations."""
        given = batch.spans
        pairs = zip(given.lengths.tolist(), given.ends.tolist(), strict=True)
        expanded = [index for index, (length, end) in enumerate(pairs) if length > 1 and heads.expands(length, end)]
        others = np.setdiff1d(np.arange(len(given)), expanded)
        lengths = given.lengths[others]
        firsts = lengths.cumsum() - lengths
        rows = np.repeat(given.first_rows[others] - firsts, lengths) + np.arange(lengths.sum())
        spans = np.stack((firsts, given.starts[others], given.ends[others], given.rows[others]), axis=1)
        return cls(torch.from_numpy(rows) if len(others) else None, torch.from_numpy(spans), expanded)


def paged_cpu_error() -> str | None:
    """None where this backend works; else why not."""
    library = load_native(SOURCE)
    return library if isinstance(library, str) else None


def _amx_works() -> bool:
    """Whether AMX works, as nf4_kernels found by trying it: an instruction set that the CPU reports may still fault."""
    return cpu.load_error() is None and cpu.isa() == "amx"


class PagedCpuBackend(SdpaBackend):
    """The reference's cache in float32, whatever the model's dtype is: queries, keys and values are converted.

    Raises RuntimeError where paged_cpu_error() gives a reason.
    """

    def __init__(
        self,
        shapes: list[LayerShape],
        options: list[AttentionOptions],
        num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        super().__init__(shapes, num_blocks, block_size, torch.float32, device)
        library = load_native(SOURCE)
        if isinstance(library, str):
            raise RuntimeError(library)
        self._attend = library.paged_attend
        self._attend.argtypes = (ctypes.c_void_p,)
        self._attend.restype = None
        self._attend_step = library.paged_attend_step
        self._shapes = shapes
        self._options = options
        self._pointers = [(k.data_ptr(), v.data_ptr()) for k, v in zip(self._keys, self._values, strict=True)]
        self._call = _Call(block_size=block_size, amx=_amx_works())
        self._address = ctypes.addressof(self._call)
        # The tensors that _call points to.
        self._kept: tuple[torch.Tensor, ...] = ()
        self._parts: dict[HeadSizes, _Parts] = {}

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        given = batch.spans
        tables = torch.from_numpy(given.tables.blocks)
        spans = torch.from_numpy(np.stack((given.first_rows, given.starts, given.ends, given.rows), axis=1))
        self._kept = (batch.slots, tables, spans)
        self._parts = {}
        call = self._call
        call.slots, call.tables, call.spans = (tensor.data_ptr() for tensor in self._kept)
        call.tokens, call.singles, call.sequences = batch.num_tokens, batch.num_single, len(batch.spans)
        call.table_width = tables.shape[1]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        dtype = query.dtype
        query, key, value = query.float(), key.float(), value.float()
        out = torch.empty(query.shape[0], query.shape[1], self._shapes[layer].value_dim)
        self._fill(self._call, layer, (query, key, value, out), options)
        self._attend(self._address)
        self._attend_again(layer, query, out, options)
        return out.to(dtype)

    def attend_latent(
        self, layer: int, query: torch.Tensor, latent: torch.Tensor, heads: LatentHeads, options: AttentionOptions
    ) -> torch.Tensor:
        """See AttentionBackend. Chunks for which it takes fewer operations attend over expanded keys and values."""
        batch = self._batch
        assert batch is not None
        if heads.sizes not in self._parts:
            self._parts[heads.sizes] = _Parts.of(batch, heads)
        parts = self._parts[heads.sizes]
        if not parts.expanded or self._image_queries:
            return super().attend_latent(layer, query, latent, heads, options)
        self._flat_keys[layer].index_copy_(0, batch.slots, latent.float())
        out = query.new_empty(*query.shape[:2], heads.sizes.width)
        call = _Call.from_buffer_copy(self._call)
        call.tokens = 0
        if parts.rows is not None:
            absorbed = heads.absorbed(query[parts.rows]).float()
            sums = absorbed.new_empty(*absorbed.shape[:2], heads.sizes.rank)
            self._fill(call, layer, (absorbed, latent, latent, sums), options)
            call.spans = parts.spans.data_ptr()
            call.sequences = len(parts.spans)
            self._attend(ctypes.addressof(call))
            out[parts.rows] = heads.values_of(sums.to(query.dtype))
        for index in parts.expanded:
            self._attend_expanded(layer, batch.spans[index], query, out, heads, options)
        return out

    def _attend_expanded(
        self,
        layer: int,
        span: Span,
        query: torch.Tensor,
        out: torch.Tensor,
        heads: LatentHeads,
        options: AttentionOptions,
    ) -> None:
        """Fill out's rows of one sequence, whose latents are in the cache; its keys and values take the place of a cache."""
        rows, blocks = slice(span.row, span.row + span.length), torch.tensor(list(span.blocks))
        latents = self._keys[layer].index_select(0, blocks).flatten(0, 2)[: span.end].to(query.dtype)
        keys, values = (tensor.float() for tensor in heads.expanded(latents))
        own, sums = query[rows].float(), torch.empty(span.length, query.shape[1], values.shape[2])
        place = torch.tensor([0, span.start, span.end, 0])
        call = _Call(block_size=span.end, amx=self._call.amx, sequences=1, table_width=1)
        self._fill(call, layer, (own, own, own, sums), options)
        # The one block is the first of the table, whose number is 0 as the first of place.
        call.spans, call.tables = place.data_ptr(), place.data_ptr()
        call.key_cache, call.value_cache = keys.data_ptr(), values.data_ptr()
        call.kv_heads = query.shape[1]
        call.key_dim, call.value_dim, call.value_row = keys.shape[2], values.shape[2], values.stride(1)
        self._attend(ctypes.addressof(call))
        out[rows] = sums.to(out.dtype)

    def call_of(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor
    ) -> tuple[int, tuple[int, int], object]:
        """A call that attends as attend() does, in the step that has begun and in all later ones of as many tokens.

        Tensors are float32 and stay where they are. Returns a C function's address, its two arguments, and what must be
        kept while these are used.
        """
        call = _Call.from_buffer_copy(self._call)
        self._fill(call, layer, (query, key, value, out), self._options[layer])
        function = ctypes.cast(self._attend_step, ctypes.c_void_p).value
        assert function is not None
        return function, (ctypes.addressof(call), self._address), call

    def _fill(self, call: _Call, layer: int, tensors: tuple[torch.Tensor, ...], options: AttentionOptions) -> None:
        """Put a layer's part into call, beside what begin() puts there; tensors: query, key, value, result."""
        query, key, value, out = tensors
        shape = self._shapes[layer]
        call.query, call.key, call.value, call.out = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        call.query_token, call.query_head, _ = query.stride()
        call.key_token, call.key_head, _ = key.stride()
        call.value_token, call.value_head, _ = value.stride()
        call.key_cache, call.value_cache = self._pointers[layer]
        call.heads, call.kv_heads = query.shape[1], shape.kv_heads
        call.key_dim, call.value_dim = shape.key_dim, shape.value_dim
        call.value_row = shape.key_dim if shape.is_latent else shape.value_dim
        call.window, call.scaling, call.softcap = options.window or 0, options.scaling, options.softcap or 0.0
        call.sinks = self.sinks[layer].data_ptr() if options.sinks else None
