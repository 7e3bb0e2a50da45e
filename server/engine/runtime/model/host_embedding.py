"""Lets a GPU read an embedding that is in host memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from server.checkpoint.host_embedding import HostEmbedding
from server.engine.runtime.limits import EngineConfigError
from server.engine.runtime.memory import pin
from server.engine.runtime.trials import failure


def read_from_host(model: Any) -> None:
    """Let a model on CUDA read its embedding from host memory, if it is there. Raises EngineConfigError if that fails."""
    embedding: nn.Module = model.get_input_embeddings()
    if not isinstance(embedding, HostEmbedding) or model.device.type != "cuda":
        return
    failed = failure(lambda: _read_by_launches(embedding, model.device))
    if failed is not None:
        raise EngineConfigError(f"engine.embedding_device is cpu, but the GPU cannot read the embedding: {failed}")


def _read_by_launches(embedding: HostEmbedding, device: torch.device) -> None:
    # Triton is not installed without CUDA.
    from server.engine.runtime.model.host_rows import rows_of

    table = embedding.weight = pin(embedding.weight.contiguous(), device)
    ids = torch.tensor([[0, table.shape[0] - 1], [table.shape[0] // 2, 1]])
    if not torch.equal(rows_of(table, ids.to(device)).cpu(), table[ids]):
        raise ValueError("it reads other rows")
    embedding.forward = partial(rows_of, table)  # type: ignore[method-assign]
