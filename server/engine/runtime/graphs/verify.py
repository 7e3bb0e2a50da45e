"""Steps with draft tokens as CUDA graphs: decode graphs in which tokens may be of one sequence."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from nf4_kernels.cuda.device_clock import DeviceClock
from server.engine.runtime.attention.graph_backend import GraphBackend
from server.engine.runtime.batch import Batch, to_device
from server.engine.runtime.graphs.decode import DecodeGraphs
from server.engine.runtime.graphs.invariant import in_groups
from server.engine.runtime.graphs.pool import GraphPool
from server.engine.runtime.sampling.sampler import ModelOutput

SIZES = (2, 4, 8, 16, 32, 64)
"""Tokens of a step, draft tokens and all. GEMMs cost the same for one token as for eight, and little more for 16."""


class VerifyGraphs(DecodeGraphs):
    """Replays steps of newest tokens and draft tokens, each as a sequence of one token whose neighbours it sees.

    In every layer a token attends to those of its sequence in front of it, too. So a graph's size is its number of tokens,
    however they are divided among sequences.
    """

    shared = True

    def __init__(
        self,
        model: PreTrainedModel,
        backend: GraphBackend,
        block_size: int,
        clock: DeviceClock | None,
        adapter_slots: int,
        pool: GraphPool,
    ) -> None:
        super().__init__(model, backend, block_size, clock, adapter_slots, pool, waited_for=True)
        self._block_size = block_size

    def fits(self, batch: Batch) -> bool:
        """Whether the logits of all tokens of batch are wanted, in order, and a graph is large enough."""
        count = batch.num_tokens
        return count <= self._largest and torch.equal(batch.sampled_rows, torch.arange(count))

    def run(self, batch: Batch, newest: torch.Tensor | None = None, source: list[int] | None = None) -> ModelOutput:
        """See DecodeGraphs.run(); tokens of batch may be of one sequence."""
        if batch.num_single < batch.num_tokens:
            _, batch = next(in_groups(batch, self._block_size, self._largest))
        return super().run(batch, newest, source)

    def run_last(self, batch: Batch, newest: torch.Tensor | None = None) -> ModelOutput:
        """run() with what it finds for batch.sampled_rows alone."""
        output = self.run(batch, newest)
        assert output.greedy is not None
        rows = to_device(batch.sampled_rows.numpy(), output.logits.device)
        best, tokens = output.greedy
        return ModelOutput(output.logits[rows], (best[rows], tokens[rows]))
