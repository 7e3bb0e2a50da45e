"""The CPU backend: attention in C++ that reads keys and values from the KV blocks in place."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch

from nf4_kernels import cpu
from server.engine.runtime.attention.base import AttentionOptions, LayerShape
from server.engine.runtime.attention.sdpa import SdpaBackend
from server.engine.runtime.batch import Batch
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
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "key_dim", "value_dim", "window")),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
        ("amx", ctypes.c_int32),
    )


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

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        given = batch.spans
        width = int(given.counts.max())
        tables = torch.from_numpy(given.tables.blocks[given.rows, :width].astype(np.int64))
        spans = torch.from_numpy(np.stack((given.first_rows, given.starts, given.ends), axis=1))
        self._kept = (batch.slots, tables, spans)
        call = self._call
        call.slots, call.tables, call.spans = (tensor.data_ptr() for tensor in self._kept)
        call.tokens, call.singles, call.sequences = batch.num_tokens, batch.num_single, len(batch.spans)
        call.table_width = width

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
        call.window, call.scaling, call.softcap = options.window or 0, options.scaling, options.softcap or 0.0
        call.sinks = self.sinks[layer].data_ptr() if options.sinks else None
