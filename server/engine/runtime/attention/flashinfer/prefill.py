"""FlashInfer's paged attention for long chunks of prompts: a plan for each step, a launch for each layer."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import torch

from nf4_kernels.cuda.device import capability
from server.config import default_cache_dir
from server.engine.runtime.attention.base import AttentionOptions
from server.engine.runtime.attention.flashinfer.compiler import missing_compiler, prepare_compiler
from server.engine.runtime.attention.flashinfer.page_tables import page_tables
from server.engine.runtime.attention.kernels import chunk_items
from server.engine.runtime.attention.kernels.kv_cache import Kind, LayerCache
from server.engine.runtime.batch import Span, Spans
from server.engine.runtime.trials import failure, relative_error

logger = logging.getLogger(__name__)

LONG_CHUNKS = 256
"""Tokens of a step's chunks from which on FlashInfer attends."""
MAX_DIM = 256
"""Elements of the longest heads that its kernels take."""
# FlashInfer's launches fill the device with two thread blocks for each multiprocessor, of up to so many queries each.
_BLOCKS_PER_PROCESSOR, _QUERIES_PER_BLOCK = 2, 128
_SLACK_BYTES = 16 * 2**20
_TOLERANCE = 0.02
"""Largest difference from our own kernel's outputs, as a share of their norm: rounding alone stays below."""


class FlashInferPrefill:
    """Attention of chunks over a cache in 16 bits, for layers without window, soft cap and sinks.

    The other layers gain little from these kernels.
    """

    def __init__(self, kinds: Sequence[Kind], block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """kinds: of those layers for which is_plain() says so. Hopper gets FlashInfer's FA3 kernels, other GPUs FA2."""
        # FlashInfer is not installed without CUDA.
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._block_size, self._dtype = block_size, dtype
        properties = torch.cuda.get_device_properties(device)
        kernels = "fa3" if capability(device) == (9, 0) else "fa2"
        need = 0
        for kind in kinds:
            blocks = max(1, _BLOCKS_PER_PROCESSOR * properties.multi_processor_count // kind.kv_heads)
            need = max(need, blocks * _QUERIES_PER_BLOCK * kind.heads * (kind.dim + 1) * 4)
        room = torch.zeros(need + _SLACK_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[Kind, Any] = {
            kind: BatchPrefillWithPagedKVCacheWrapper(room, "NHD", backend=kernels) for kind in kinds
        }
        self._rows = slice(None)
        # Plans are copied to the device from one piece of pinned memory of each wrapper; this says that they are there.
        self._copied = torch.cuda.Event()

    def takes(self, kind: Kind) -> bool:
        """Whether it attends for layers of a kind."""
        return kind in self._wrappers

    def plan(self, spans: Spans, singles: int) -> None:
        """Lay out the chunks of a step: all its spans but the first `singles`, a token each."""
        self._rows = slice(singles, None)
        tables = page_tables(spans, self._block_size, slice(singles, len(spans)))
        # The step before may not have begun, for other work on the GPU: its plan would be overwritten.
        self._copied.synchronize()
        for kind, wrapper in self._wrappers.items():
            wrapper.plan(
                tables.rows,
                tables.starts,
                tables.blocks,
                tables.last,
                kind.heads,
                kind.kv_heads,
                kind.dim,
                self._block_size,
                causal=True,
                sm_scale=kind.options.scaling,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )
        self._copied.record()

    def attend(self, kind: Kind, query: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
        """Write the attention of the chunks' tokens into their rows of out [T, heads, dim], contiguous.

        query [T, heads, dim]; cache [blocks, 2, block_size, kv_heads, dim] holds the step's own keys and values, too.
        """
        rows = self._rows
        self._wrappers[kind].run(query[rows].contiguous(), cache, out=out[rows])


def is_plain(options: AttentionOptions) -> bool:
    """Whether a layer attends to all keys, without a cap and without sinks."""
    return options.window is None and options.softcap is None and not options.sinks


def _has_kernels(kind: Kind) -> bool:
    return not kind.is_latent and kind.dim <= MAX_DIM


def load_in_background(
    kinds: Sequence[Kind],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    use: Callable[[FlashInferPrefill], None],
) -> Thread | None:
    """Compile or load FlashInfer's kernels in a thread, try them, and call use there; the log says what is slower if not.

    kinds: the layers'; those that FlashInfer takes are picked. None, with nothing begun, if there are none.
    """
    plain = [kind for kind in dict.fromkeys(kinds) if is_plain(kind.options) and _has_kernels(kind)]
    if not plain or dtype not in (torch.bfloat16, torch.float16):
        return None
    if importlib.util.find_spec("flashinfer") is None:
        logger.info("long prompts attend by our own kernel, up to a tenth more slowly: FlashInfer is not installed")
        return None

    def load() -> None:
        # Of this thread alone, and of the compilers that it starts: the engine goes first.
        os.setpriority(os.PRIO_PROCESS, 0, 10)
        try:
            failed = failure(lambda: use(_loaded(plain, block_size, dtype, device)))
        except torch.OutOfMemoryError:
            failed = "no memory is left for its workspace"
        if failed is not None:
            reason = missing_compiler() or failed
            logger.warning(
                "long prompts attend by our own kernel, up to a tenth more slowly: FlashInfer fails: %s", reason
            )
        else:
            logger.info("long prompts attend by FlashInfer")

    thread = Thread(target=load, name="flashinfer", daemon=True)
    thread.start()
    return thread


@functools.cache
def _environment() -> None:
    # FlashInfer's logger does not write to ours, and has a format of its own.
    os.environ.setdefault("FLASHINFER_LOGGING_LEVEL", "error")
    os.environ.setdefault("MAX_JOBS", str(max(1, (os.cpu_count() or 2) // 2)))
    prepare_compiler(default_cache_dir())


@torch.inference_mode()
def _loaded(kinds: Sequence[Kind], block_size: int, dtype: torch.dtype, device: torch.device) -> FlashInferPrefill:
    """The kernels, compiled if they have to be. Raises what FlashInfer raises, and ValueError if results differ."""
    _environment()
    prefill = FlashInferPrefill(kinds, block_size, dtype, device)
    with torch.cuda.device(device):
        for kind in kinds:
            _try(prefill, kind, block_size, dtype, device)
    return prefill


def _try(prefill: FlashInferPrefill, kind: Kind, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Attend in a chunk of random queries behind as many tokens. Raises ValueError if our own kernel differs."""
    # Triton is not installed without CUDA.
    from server.engine.runtime.attention.kernels.chunk_kernel import attend_chunks, tokens_per_item

    tokens, blocks = LONG_CHUNKS, -(-2 * LONG_CHUNKS // block_size)
    spans = Spans.of([Span(0, tokens, tokens, range(blocks))])
    cache = torch.randn(blocks, 2, block_size, kind.kv_heads, kind.dim, device=device).to(dtype)
    query = torch.randn(tokens, kind.heads, kind.dim, device=device).to(dtype)
    found, expected = torch.empty_like(query), torch.empty_like(query)
    columns = spans.first_rows, spans.lengths, spans.starts, spans.rows
    items = chunk_items.layout(*columns, tokens_per_item(kind, device))
    tables = torch.arange(blocks, dtype=torch.int32, device=device)[None]
    numbers = torch.from_numpy(items).to(device)
    attend_chunks(LayerCache(cache, None), query, expected, numbers, len(items) - 1, tables, kind.options)
    prefill.plan(spans, 0)
    prefill.attend(kind, query, cache, found)
    error = relative_error(found, expected)
    if not error < _TOLERANCE:
        raise ValueError(f"outputs are off by {error:.1e}")
