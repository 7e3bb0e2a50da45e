"""The interface of attention backends whose steps can be captured in CUDA graphs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from server.engine.runtime.attention.base import AttentionBackend
from server.engine.runtime.batch import Spans

ROTARY_FROM = 8
"""Sequences of a decode graph from which on the launch that attends computes rotary embeddings.

With fewer sequences a kernel of its own for them takes less time than the start of the attention's launch, which that
kernel hides (docs/adr/0011-decode-attention.md).
"""


@dataclass(frozen=True)
class DecodeForm:
    """Form of a launch that attends in a decode graph; a kernel is compiled for each."""

    rotary: bool
    """Whether the launch computes rotary embeddings."""
    norms: bool
    """Whether it normalises queries and keys in front of them."""
    tile: int
    """Tokens of a tile of the result; 0: the result is not tiled."""


class GraphBackend(AttentionBackend):
    """A backend whose forward passes can be captured in CUDA graphs.

    A graph's kernels read where a step's keys are from memory of the backend's own. plan_decode_graph() and
    plan_mixed_graph() write a step's layout there, once before the capture and then before every replay. While a graph
    is captured, begin_decode_graph() or begin_mixed_graph() takes the place of begin().
    """

    scratch_block: int
    """A KV block of no sequence: padding writes its keys and values there."""

    @abstractmethod
    def set_up_graphs(
        self, max_model_len: int, max_num_seqs: int, split_keys: bool, forms: Collection[DecodeForm] = ()
    ) -> None:
        """Prepare for graphs of up to max_num_seqs sequences of up to max_model_len tokens; call before any plan.

        All steps that follow, those without graphs, too, may have as many.
        forms: those that decode graphs are likely to ask for, so that their kernels can be compiled side by side.
        split_keys: whether a sequence's keys may be divided among thread blocks, which depends on how many and how long
        the step's sequences are and so changes the order of sums.
        """

    @abstractmethod
    def plan_decode_graph(self, spans: Spans, size: int, shared: bool = False) -> None:
        """Lay out a step of one-token sequences for the graph of size sequences; those beyond spans are padding.

        shared: as the graph was captured. Where it is, spans may be tokens of one sequence, one after another, side by side
        and in the same row of the block tables.
        """

    def advance_decode_graph(self, inputs: torch.Tensor, tokens: torch.Tensor) -> bool:
        """Lay out the step behind the one that has been laid out last, in which the host plays no part but to launch.

        The first len(tokens) sequences go on by one token each. tokens: int64, their newest ones; inputs: int64 [3, size],
        the graph's ids, positions and slots, which are advanced, too. The host's block tables must have room for them, and
        must have had it at the last plan. False, with nothing done, where only plan_decode_graph() can do so.
        """
        return False

    @abstractmethod
    def begin_decode_graph(self, slots: torch.Tensor, shared: bool = False) -> None:
        """Capture the decode graph of len(slots) sequences; slots is the buffer that the graph will read.

        shared: its tokens may be of one sequence, one after another; each attends to those in front of it.
        """

    @abstractmethod
    def plan_mixed_graph(self, spans: Spans, size: int, sequences: int) -> Any:
        """Lay out a step for the graph of `size` tokens and `sequences` sequences; returns begin_mixed_graph()'s plan.

        The first plan must be that of the largest size.
        """

    @abstractmethod
    def begin_mixed_graph(self, slots: torch.Tensor, plan: Any) -> None:
        """Capture the mixed graph that plan was made for; slots is the buffer that the graph will read."""
