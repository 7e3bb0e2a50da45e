"""The states of all sequences: a slot for each running sequence, and slots of snapshots, some of them in host memory.

A running sequence's slot is its row of the block tables, which is its own while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from server.engine.runtime.batch import Spans, pinned, to_device
from server.engine.runtime.memory import pin
from server.engine.runtime.states.kinds import LONG_CHUNK, StateKind

PADDING = -1
"""The slot of a row that is no sequence's."""
_UNKNOWN = -1


class StateError(RuntimeError):
    """A step does not go on where a state ends; the message is one line."""


@dataclass(frozen=True)
class StateStep:
    """The sequences of a forward pass as layers with states see them: first those of one token, then chunks."""

    singles: torch.Tensor
    """int32 [sequences]: slots of sequences that have one token each and go on."""
    chunks: torch.Tensor
    """int32 [S]: slots of the other sequences."""
    query_start_loc: torch.Tensor
    """int32 [S + 1]: chunk i has the rows query_start_loc[i] ... query_start_loc[i + 1] - 1 of those behind the singles."""
    has_state: torch.Tensor
    """bool [S]: whether the chunk goes on. One that does not begins with a state of zeros."""
    lengths: Sequence[int] = ()
    """[S]: tokens of the chunks; none in a graph."""
    longest: int = 0
    """Tokens of the longest chunk; in a graph, of the longest that it takes."""
    is_captured: bool = False
    """Whether a CUDA graph of chunks is captured, whose lengths are on the device only."""
    shared: dict[object, Any] = field(default_factory=dict)
    """Results of the first layer of a kind for all of them."""


class StatePool:
    """Allocates every layer's states, copies them, and says which slots a forward pass reads and writes.

    It knows how many tokens each slot's state has seen. A step that does not begin there is refused with a StateError: its
    answers would be wrong, for instance if a step were computed twice.
    """

    def __init__(
        self,
        kinds: Sequence[StateKind],
        max_num_seqs: int,
        device: torch.device,
        num_snapshots: int = 0,
        has_backups: bool = False,
        num_host_snapshots: int = 0,
    ) -> None:
        """kinds: one for each layer that has a state, in order. has_backups: whether draft tokens are verified.

        Raises RuntimeError if the host's memory cannot be pinned, or does not keep a state as it was.
        """
        self.kinds = list(kinds)
        self.max_num_seqs = max_num_seqs
        self.device = device
        self.snapshots = range(max_num_seqs, max_num_seqs + num_snapshots)
        """The slots of snapshots."""
        # Two sequences run in the check of a start, before there are snapshots.
        count = max(2, max_num_seqs + num_snapshots)
        self.backups = range(count, count + max_num_seqs if has_backups else count)
        """The slots of states from before draft tokens, by the row of each running sequence."""
        count += len(self.backups)
        self._stacks = {
            kind: [
                torch.zeros(
                    self.kinds.count(kind), count + kind.has_spare, *tensor.shape, dtype=tensor.dtype, device=device
                )
                for tensor in kind.tensors
            ]
            for kind in dict.fromkeys(self.kinds)
        }
        self.host_snapshots = range(count, count + num_host_snapshots)
        """The slots of snapshots in host memory."""
        self._on_host = [
            pin(torch.zeros(stack.shape[0], num_host_snapshots, *stack.shape[2:], dtype=stack.dtype), device)
            for stack in (self._tensors() if num_host_snapshots else ())
        ]
        self._seen = np.full(count + num_host_snapshots, _UNKNOWN, np.int64)
        if num_host_snapshots:
            self._check_host()
        self._step: StateStep | None = None
        # The slots of decode graphs.
        self._graph_slots = torch.full((max_num_seqs,), PADDING, dtype=torch.int32, device=device)
        self._planned = b""
        # Slots, bounds and has_state of graphs of chunks, which have one sequence more than run.
        self._graph_chunks = torch.zeros(3 * (max_num_seqs + 1) + 1, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all states on the device."""
        return sum(tensor.nbytes for stack in self._stacks.values() for tensor in stack)

    def of_layer(self, index: int) -> list[torch.Tensor]:
        """The tensors [slots, *shape] of the state layer with this index, as its kind has them."""
        kind = self.kinds[index]
        place = self.kinds[:index].count(kind)
        return [tensor[place] for tensor in self._stacks[kind]]

    @property
    def step(self) -> StateStep:
        """The forward pass that has begun last."""
        assert self._step is not None
        return self._step

    def begin(self, spans: Spans, num_single: int) -> None:
        """Prepare what the layers of the coming forward pass read; the first num_single spans are one token each.

        Raises StateError.
        """
        self._note(spans)
        # What begins goes with the chunks, whose launch takes no old state.
        singles = num_single if bool((spans.starts[:num_single] > 0).all()) else 0
        rows, starts = spans.rows, spans.starts[singles:]
        bounds = np.append(0, spans.lengths[singles:].cumsum())
        given = to_device(np.concatenate((rows, bounds, starts > 0)).astype(np.int32), self.device)
        of_rows, of_bounds, of_starts = given.split((len(rows), len(bounds), len(starts)))
        lengths = spans.lengths[singles:].tolist()
        longest = max(lengths, default=0)
        self._step = StateStep(of_rows[:singles], of_rows[singles:], of_bounds, of_starts.bool(), lengths, longest)

    def begin_decode_graph(self, size: int) -> None:
        """Let the layers of a decode graph of `size` sequences read the slots that plan_decode_graph() writes."""
        none = self._graph_slots[:0]
        self._step = StateStep(self._graph_slots[:size], none, none, none.bool())

    def plan_decode_graph(self, spans: Spans, size: int) -> None:
        """Lay out a step of one-token sequences for the graph of `size` sequences; those beyond spans are padding.

        Raises StateError.
        """
        self._note(spans)
        for row in spans.rows[spans.starts == 0].tolist():
            self.clear(row)
        slots = np.full(size, PADDING, np.int32)
        slots[: len(spans)] = spans.rows
        planned = slots.tobytes()
        if planned == self._planned:
            return
        self._graph_slots[:size].copy_(pinned(slots, self.device), non_blocking=True)
        self._planned = planned

    def is_long(self, spans: Spans) -> bool:
        """Whether other kernels compute a step than steps of short chunks."""
        return any(kind.is_chunked for kind in self._stacks) and int(spans.lengths.max(initial=0)) >= LONG_CHUNK

    @property
    def captures_long(self) -> bool:
        """Whether there are such steps, and graphs can have them."""
        return any(kind.is_chunked for kind in self._stacks) and not any(kind.waits for kind in self._stacks)

    def begin_chunks_graph(self, size: int, sequences: int, is_long: bool) -> None:
        """Let the layers of a graph of `size` tokens in chunks read what plan_chunks_graph() writes.

        is_long: whether a chunk may have LONG_CHUNK tokens and more.
        """
        slots, bounds, has_state = self._of_chunks_graph(sequences)
        longest = size if is_long else min(size, LONG_CHUNK - 1)
        self._step = StateStep(slots[:0], slots, bounds, has_state.bool(), longest=longest, is_captured=True)

    def plan_chunks_graph(self, spans: Spans, size: int, sequences: int) -> None:
        """Lay out a step for the graph of `size` tokens and `sequences` sequences. Raises StateError.

        Tokens that are padding are a sequence of their own, without a slot.
        """
        self._note(spans)
        count = len(spans)
        slots, bounds, has_state = (np.full(sequences + 1, fill, np.int32) for fill in (PADDING, size, 0))
        slots[:count], bounds[:count], has_state[:count] = spans.rows, spans.lengths.cumsum(), spans.starts > 0
        numbers = np.concatenate((slots, [0], bounds, has_state), dtype=np.int32)
        self._graph_chunks[: len(numbers)].copy_(to_device(numbers, self.device))

    def _of_chunks_graph(self, sequences: int) -> Sequence[torch.Tensor]:
        sizes = (sequences + 1, sequences + 2, sequences + 1)
        return list(self._graph_chunks[: sum(sizes)].split_with_sizes(sizes))

    def clear(self, slot: int) -> None:
        """Make a slot's state that of a sequence without tokens."""
        for tensor in self._tensors():
            tensor[:, slot].zero_()

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy states from slots to slots, after the steps before this call and before those that follow it."""
        for source, target in copies:
            if max(source, target) < self.host_snapshots.start:
                for tensor in self._tensors():
                    tensor[:, target].copy_(tensor[:, source])
            else:
                # Layer by layer, because other transfers take a second copy on the device.
                for own, other in zip(self._by_layer(target), self._by_layer(source), strict=True):
                    own.copy_(other, non_blocking=True)
            self._seen[target] = self._seen[source]

    def _check_host(self) -> None:
        first, second, host = self._by_layer(0), self._by_layer(1), self.host_snapshots[0]
        for tensor in first:
            tensor.normal_()
        self.copy([(0, host), (host, 1)])
        if not all(map(torch.equal, first, second)):
            raise RuntimeError("a state that was kept in host memory comes back changed")
        self.clear(0)
        self.clear(1)

    def _by_layer(self, slot: int) -> list[torch.Tensor]:
        first = self.host_snapshots.start
        stacks, place = (self._tensors(), slot) if slot < first else (self._on_host, slot - first)
        return [layer[place] for stack in stacks for layer in stack]

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for stack in self._stacks.values() for tensor in stack]

    def _note(self, spans: Spans) -> None:
        """Count the tokens of a step as seen. Raises StateError for one that does not begin where its state ends."""
        rows, starts = spans.rows, spans.starts
        wrong = np.flatnonzero((starts > 0) & (self._seen[rows] != starts))
        if len(wrong):
            row, start = int(rows[wrong[0]]), int(starts[wrong[0]])
            raise StateError(f"a step begins at token {start} of a sequence whose state ends at {self._seen[row]}")
        self._seen[rows] = spans.ends
