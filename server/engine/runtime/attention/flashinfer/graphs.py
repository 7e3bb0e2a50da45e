"""FlashInfer's wrappers for CUDA graphs: of decode steps, and of mixed steps with both chunks and single tokens."""

from __future__ import annotations

from typing import Any

import torch

from server.engine.runtime.attention.kernels.kv_cache import Kind

QUERIES_PER_BLOCK = 128
"""The most queries that a thread block takes in one of FlashInfer's launches."""
_SLACK_BYTES = 16 * 2**20

LONGEST = 8192
"""Tokens that a sequence of a mixed step may have: one thread block goes through all of its keys."""

# A plan's tables have a few integers for each tile of queries.
_PLAN_BYTES = 1 << 20


class DecodeWrappers:
    """Wrappers for decode graphs by their number of sequences; a replay reads what the latest plan of its size laid out."""

    def __init__(self, kinds: list[Kind], room: torch.Tensor, most_blocks: int) -> None:
        """Each size has a wrapper for each of kinds. room: of workspace(). most_blocks: a sequence's KV blocks at most."""
        self._kinds = kinds
        self._room = room
        self._most_blocks = most_blocks
        self._wrappers: dict[int, dict[Kind, Any]] = {}

    def of(self, size: int) -> dict[Kind, Any]:
        """The wrappers for the graph of size sequences."""
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
    """Memory that FlashInfer's launches write to, with room for need bytes of partial results."""
    return torch.zeros(need + _SLACK_BYTES, dtype=torch.uint8, device=device)


def partial_bytes(kind: Kind, rows: int) -> int:
    """Bytes for rows of queries whose keys are split among thread blocks: float32 outputs and a sum for each head."""
    return rows * kind.heads * (kind.dim + 1) * 4


def _graph_rows(kind: Kind, size: int) -> int:
    """Rows of queries that a graph of size sequences makes room for; a thread block takes 16, 64 or 128 of them."""
    group = kind.heads // kind.kv_heads
    tile = 16 if group <= 16 else 64 if group <= 64 else QUERIES_PER_BLOCK
    return (-(-size * group // tile) + size) * tile


class MixedWrappers:
    """Wrappers for mixed graphs by their number of tokens; a replay reads what the latest plan of its size laid out.

    A graph's launches depend on its size alone, whatever its sequences are. Splitting keys would need room for the
    partial results of every tile that there could be, hundreds of MB.
    """

    def __init__(self, kinds: list[Kind], room: torch.Tensor, block_size: int) -> None:
        """Each size has a wrapper for each of kinds. room: workspace()."""
        self._room = room
        self._block_size = block_size
        self._wrappers: dict[int, dict[Kind, Any]] = {}
        # All sizes share one room, because replays follow one another, and each has a plan of its own in front.
        self._plans = {kind: torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=room.device) for kind in kinds}

    def of(self, size: int, sequences: int) -> dict[Kind, Any]:
        """The wrappers for the graph of size tokens; sequences is the same at every call for a size.

        Their first plan must have size tokens.
        """
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
