"""FlashInfer's wrappers for CUDA graphs: of decode steps, and of steps that mix prompts' chunks and single tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from server.engine.runtime.attention.base import AttentionOptions

QUERIES_PER_BLOCK = 128
"""The most that a block of the device takes in one of FlashInfer's launches."""
_SLACK_BYTES = 16 * 2**20

LONGEST = 8192
"""Tokens that a sequence of such a step may have: its keys are not shared out among blocks of the device."""

# Of a plan's tables: a few integers for each tile of queries.
_PLAN_BYTES = 1 << 20


@dataclass(frozen=True)
class Kind:
    """Layers that attend alike share a plan."""

    heads: int
    kv_heads: int
    dim: int
    options: AttentionOptions


class DecodeWrappers:
    """Wrappers for graphs of so many one-token sequences; a replay reads what the latest plan of its size laid out."""

    def __init__(self, kinds: list[Kind], room: torch.Tensor, most_blocks: int) -> None:
        """kinds: for each size there is a wrapper of each. room: workspace(). most_blocks: of a sequence."""
        self._kinds = kinds
        self._room = room
        self._most_blocks = most_blocks
        self._wrappers: dict[int, dict[Kind, Any]] = {}

    def of(self, size: int) -> dict[Kind, Any]:
        """Those of the graph of size sequences."""
        if size not in self._wrappers:
            self._wrappers[size] = self._new_wrappers(size)
        return self._wrappers[size]

    def _new_wrappers(self, size: int) -> dict[Kind, Any]:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        def buffer(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, device=self._room.device)

        # The largest graph comes first; the others share what it needed.
        need = max(partial_bytes(kind, _graph_rows(kind, size)) for kind in self._kinds)
        if need > self._room.numel():
            self._room = workspace(need, self._room.device)
        tables = buffer(size * self._most_blocks)
        return {
            kind: BatchDecodeWithPagedKVCacheWrapper(
                self._room,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=buffer(size + 1),
                # Sequences share blocks, so their tables together may name more than there are.
                paged_kv_indices_buffer=tables,
                paged_kv_last_page_len_buffer=buffer(size),
                backend="fa2",
            )
            for kind in self._kinds
        }


def workspace(need: int, device: torch.device) -> torch.Tensor:
    """What FlashInfer's launches may write to, with room for partial results of so many bytes."""
    return torch.zeros(need + _SLACK_BYTES, dtype=torch.uint8, device=device)


def partial_bytes(kind: Kind, rows: int) -> int:
    """What rows of queries need whose keys are shared out: float32 outputs and a sum for each head."""
    return rows * kind.heads * (kind.dim + 1) * 4


def _graph_rows(kind: Kind, size: int) -> int:
    """Rows of queries for which a graph of size sequences makes room; its blocks take 16, 64 or 128 of them."""
    group = kind.heads // kind.kv_heads
    tile = 16 if group <= 16 else 64 if group <= 64 else QUERIES_PER_BLOCK
    return (-(-size * group // tile) + size) * tile


class MixedWrappers:
    """Wrappers for graphs of so many tokens and sequences; a replay reads what the latest plan of its size laid out.

    A graph's launches go by its size, whatever its sequences are. Sharing keys out would need room for the partial
    results of every tile that there could be, hundreds of MB.
    """

    def __init__(self, kinds: list[Kind], room: torch.Tensor, block_size: int) -> None:
        """kinds: for each size there is a wrapper of each. room: workspace()."""
        self._room = room
        self._block_size = block_size
        self._wrappers: dict[int, dict[Kind, Any]] = {}
        # One for all sizes: replays follow one another, each behind its own plan.
        self._plans = {kind: torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=room.device) for kind in kinds}

    def of(self, size: int, sequences: int) -> dict[Kind, Any]:
        """Those of the graph of size tokens, always with as many sequences; their first plan must have all its tokens."""
        if size not in self._wrappers:
            self._wrappers[size] = self._new_wrappers(sequences)
        return self._wrappers[size]

    def _new_wrappers(self, sequences: int) -> dict[Kind, Any]:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        def buffer(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, device=self._room.device)

        tables = buffer(sequences * -(-LONGEST // self._block_size))
        wrappers = {}
        for kind, plan in self._plans.items():
            wrappers[kind] = BatchPrefillWithPagedKVCacheWrapper(
                self._room,
                "NHD",
                use_cuda_graph=True,
                qo_indptr_buf=buffer(sequences + 1),
                paged_kv_indptr_buf=buffer(sequences + 1),
                paged_kv_indices_buf=tables,
                paged_kv_last_page_len_buf=buffer(sequences),
                backend="fa2",
            )
            wrappers[kind].reset_workspace_buffer(self._room, plan)
        return wrappers
