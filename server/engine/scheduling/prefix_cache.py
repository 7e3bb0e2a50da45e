"""The prefix cache: what sequences find computed already, in named KV blocks and in snapshots of states."""

from __future__ import annotations

from server.engine.scheduling.blocks import BlockManager
from server.engine.scheduling.sequence import Phase, Sequence
from server.engine.scheduling.snapshots import NO_SLOT, Snapshots
from server.engine.scheduling.step import Step


class PrefixCache:
    """Lets sequences begin with the blocks that hold their first tokens already.

    Only full blocks whose computation has succeeded are shared, and the last token is always computed, so nobody writes to
    a shared block.
    """

    def __init__(self, blocks: BlockManager, enabled: bool, snapshots: Snapshots | None) -> None:
        """snapshots: of the states of a model that has some."""
        self._blocks = blocks
        self._snapshots = snapshots
        if snapshots is not None:
            # Blocks without a state at their end are of no use, and the other way round.
            blocks.on_forget = snapshots.forget
        self.enabled = enabled
        self.queries = 0
        """Tokens of new sequences that were looked up."""
        self.hits = 0
        """Looked-up tokens that were found."""

    def find(self, sequence: Sequence) -> list[int]:
        """The blocks with which a sequence may begin, all but its last token at most; it gets the snapshot for them."""
        sequence.snapshot, sequence.branch = NO_SLOT, 0
        if not self.enabled:
            return []
        keys = sequence.block_keys(self._blocks.block_size, len(sequence.tokens) - 1)
        found = self._blocks.find(keys)
        if self._snapshots is not None:
            count, sequence.snapshot = self._snapshots.find(keys[: len(found)])
            if count < len(found) and self._snapshots.is_branch(keys[len(found) - 1]):
                sequence.branch = len(found) * self._blocks.block_size
            found = found[:count]
        return found

    def begin(self, sequence: Sequence, blocks: list[int]) -> None:
        """Let a sequence that is admitted begin with the blocks that were found."""
        # A preempted sequence finds its own blocks again, which would count as a hit of its prompt.
        counts = self.enabled and not sequence.was_admitted and sequence.sampling.prompt_logprobs is None
        sequence.start_with(blocks, len(blocks) * self._blocks.block_size)
        if counts:
            self.queries += sequence.num_prompt
            self.hits += sequence.num_cached
            if sequence.snapshot != NO_SLOT and self._snapshots is not None:
                self._snapshots.note_hit(sequence.snapshot)

    def add_prefill(self, step: Step, sequence: Sequence, budget: int) -> int:
        """Step.add_prefill(), of a chunk that ends where a snapshot of states is to be taken."""
        snapshots, start = self._snapshots, sequence.num_computed
        place = None if snapshots is None else snapshots.place_after(sequence)
        length = step.add_prefill(sequence, budget if place is None else min(budget, place - start))
        if length:
            restored, sequence.snapshot = sequence.snapshot, NO_SLOT
            saved: list[int] = []
            if snapshots is not None:
                snapshots.release(sequence)
                if place == start + length:
                    saved = snapshots.take_for(sequence, place)
            step.copy_states(restored, saved)
        elif snapshots is not None and sequence.snapshot != NO_SLOT:
            snapshots.hold(sequence)
        return length

    def name_blocks(self, sequence: Sequence) -> None:
        """Let other sequences find the full blocks of a running sequence that are computed."""
        named, full = sequence.num_named, sequence.num_computed // self._blocks.block_size
        if not self.enabled or full <= named or sequence.phase is not Phase.RUNNING:
            return
        keys = sequence.block_keys(self._blocks.block_size, sequence.num_computed, named)
        for block, key in zip(sequence.blocks[named:full], keys, strict=True):
            self._blocks.name(block, key)
        sequence.num_named = full
        if self._snapshots is not None:
            self._snapshots.note_named(sequence, named)

    def drop(self, sequence: Sequence) -> None:
        """Give up the snapshots that a sequence that runs no more begins with, and that is being taken of it."""
        if self._snapshots is not None:
            self._snapshots.drop(sequence)
