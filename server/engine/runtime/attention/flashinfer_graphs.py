"""FlashInfer's wrappers for CUDA graphs of steps that mix prompts' chunks and single tokens."""

from __future__ import annotations

from typing import Any

import torch

LONGEST = 8192
"""Tokens that a sequence of such a step may have: its keys are not shared out among blocks of the device."""

# Of a plan's tables: a few integers for each tile of queries.
_PLAN_BYTES = 1 << 20


class MixedWrappers:
    """Wrappers for graphs of so many tokens and sequences; a replay reads what the latest plan of its size laid out.

    A graph's launches go by its size, whatever its sequences are. Sharing keys out would need room for the partial
    results of every tile that there could be, hundreds of MB.
    """

    def __init__(self, kinds: list[Any], workspace: torch.Tensor, block_size: int) -> None:
        """kinds: for each size there is a wrapper of each."""
        self._workspace = workspace
        self._block_size = block_size
        self._wrappers: dict[int, dict[Any, Any]] = {}
        # One for all sizes: replays follow one another, each behind its own plan.
        self._plans = {kind: torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=workspace.device) for kind in kinds}

    def of(self, size: int, sequences: int) -> dict[Any, Any]:
        """Those of the graph of size tokens, always with as many sequences; their first plan must have all its tokens."""
        if size not in self._wrappers:
            self._wrappers[size] = self._new_wrappers(sequences)
        return self._wrappers[size]

    def _new_wrappers(self, sequences: int) -> dict[Any, Any]:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        def buffer(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, device=self._workspace.device)

        tables = buffer(sequences * -(-LONGEST // self._block_size))
        wrappers = {}
        for kind, plan in self._plans.items():
            wrappers[kind] = BatchPrefillWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=True,
                qo_indptr_buf=buffer(sequences + 1),
                paged_kv_indptr_buf=buffer(sequences + 1),
                paged_kv_indices_buf=tables,
                paged_kv_last_page_len_buf=buffer(sequences),
                backend="fa2",
            )
            wrappers[kind].reset_workspace_buffer(self._workspace, plan)
        return wrappers
