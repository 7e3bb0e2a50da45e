"""Choose the sequences of the next step and their tokens: continuous batching with chunked prefill."""

from __future__ import annotations

from collections import abc, deque

from server.engine.scheduling.block_tables import BlockTables
from server.engine.scheduling.blocks import BlockManager
from server.engine.scheduling.pace import PrefillPace
from server.engine.scheduling.prefix_cache import PrefixCache
from server.engine.scheduling.sequence import PLACEHOLDER, Phase, Sequence
from server.engine.scheduling.snapshots import NO_SLOT, Snapshots
from server.engine.scheduling.step import Chunk, Drafts, Step
from server.types import FinishReason


class Scheduler:
    """Serves requests in the order in which they come.

    In every step decoding sequences go first; prefills share what is left of the budget, or what the pace leaves of it.

    A sequence is admitted when the blocks for all its present tokens are free, so only growth by decoding can run out of
    blocks. Then the newest running sequence is preempted: it gives its blocks back, keeps its tokens, and computes them
    again when it is admitted anew, before any newer request.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        prefix_caching: bool = False,
        pace: PrefillPace | None = None,
        snapshots: Snapshots | None = None,
        backups: abc.Sequence[int] = (),
    ) -> None:
        """pace: bounds the tokens of prompts in steps in which other sequences decode. snapshots: of the states of a model
        that has some; prefix_caching needs them then. backups: slots of states by the sequences' rows, for speculation.
        """
        if blocks.num_blocks * blocks.block_size < max_model_len:
            raise ValueError(
                f"{blocks.num_blocks} blocks of {blocks.block_size} tokens cannot hold one sequence of {max_model_len}"
            )
        if min(max_num_seqs, max_num_batched_tokens) < 1:
            raise ValueError("max_num_seqs and max_num_batched_tokens must be at least 1")
        self._blocks = blocks
        self._tables = BlockTables(max_num_seqs, blocks.blocks_for(max_model_len))
        self._max_num_seqs = max_num_seqs
        # Every running sequence must be able to decode in every step.
        self._budget = max(max_num_batched_tokens, max_num_seqs)
        self._max_model_len = max_model_len
        self.prefix_cache = PrefixCache(blocks, prefix_caching, snapshots)
        self.pace = pace
        self._backups = backups
        self._waiting, self._running = deque[Sequence](), list[Sequence]()
        """The running ones oldest first."""
        self.num_preemptions = 0
        self._by_id: dict[str, Sequence] = {}

    @property
    def has_work(self) -> bool:
        """Whether schedule() would return chunks."""
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks or a place."""
        return len(self._waiting)

    @property
    def adapters_in_use(self) -> set[int]:
        """Slots of the adapters of all sequences."""
        return {sequence.adapter for sequence in self._by_id.values() if sequence.adapter is not None}

    def adapter_names(self, phase: Phase) -> list[str]:
        """Names of the adapters of all sequences in a phase, in alphabetical order."""
        return sorted({s.adapter_name for s in self._by_id.values() if s.adapter_name is not None and s.phase is phase})

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises ValueError when it can never run (too long, empty, id in use)."""
        if sequence.request_id in self._by_id:
            raise ValueError(f"request id {sequence.request_id!r} is in use")
        if not 0 < sequence.num_prompt < self._max_model_len:
            raise ValueError(f"a prompt of {sequence.num_prompt} tokens does not fit into {self._max_model_len}")
        sequence.max_length = min(sequence.max_length, self._max_model_len)
        self._by_id[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def schedule(self) -> Step:
        """The next step, whose KV blocks are taken. advance() must follow, or finish() for each of its sequences."""
        step = Step()
        prefilling = self._add_decoding(step)
        budget = self._budget - step.size
        if step.preempted:
            # A later sequence's growth may have preempted one that was scheduled before it.
            step.chunks = [chunk for chunk in step.chunks if chunk.sequence.phase is Phase.RUNNING]
        decoding = step.size
        if decoding and self.pace is not None:
            budget = min(budget, self.pace.tokens)
        for sequence in prefilling:
            if budget > 0 and sequence.phase is Phase.RUNNING:
                budget -= self.prefix_cache.add_prefill(step, sequence, budget)
        while self._waiting and budget > 0 and not step.preempted and self._admit(self._waiting[0]):
            step.admitted.append(self._waiting.popleft())
            budget -= self.prefix_cache.add_prefill(step, step.admitted[-1], budget)
        if step.size > decoding:
            step.put_single_first()
        return step

    def schedule_drafts(self, step: Step, drafts: Drafts) -> None:
        """Add draft tokens to a step that decodes, as far as there are KV blocks for them.

        A block that only rejected ones needed stays with its sequence, whose next tokens will need it.
        """
        found: dict[str, abc.Sequence[int]] = {}
        for chunk in step.chunks:
            sequence, count = chunk.sequence, len(chunk.sequence.tokens)
            tokens = drafts.get(sequence.request_id, ())
            # As in _admit(): draft tokens must not be what preempts a sequence.
            if self._blocks.missing(sequence.blocks, count + len(tokens)) <= self._blocks.num_free - len(self._running):
                self._grow(sequence, count + len(tokens))
            found[sequence.request_id] = tokens[: len(sequence.blocks) * self._blocks.block_size - count]
        step.schedule_drafts(found)

    def advance(self, step: Step) -> None:
        """Account for a step that was launched, so that the next one can be scheduled; resolve() has to follow.

        Each token that the step samples is a PLACEHOLDER until then.
        """
        running = Phase.RUNNING
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence.phase is running:
                sequence.num_computed = chunk.start + chunk.length
                if chunk.samples:
                    sequence.tokens.append(PLACEHOLDER)

    def resolve(self, step: Step, tokens: list[int]) -> None:
        """Put the tokens of a step that advance() was called for in the places of its placeholders.

        tokens has one for each of step.sampled, in its order; accepted draft tokens go in front of it. Sequences that this
        ends are finished here: their blocks are free and their finish_reason is set.
        """
        if step.num_sampled != len(tokens):
            raise ValueError(f"{len(tokens)} tokens for a step that samples {step.num_sampled}")
        finished, block_size, naming = Phase.FINISHED, self._blocks.block_size, self.prefix_cache.enabled
        following = iter(tokens)
        for chunk in step.chunks:
            sequence = chunk.sequence
            if chunk.samples:
                token = next(following)
                # Sequences that are not running ended while the step ran, or were preempted and wait.
                if sequence.phase is not finished and sequence.tokens[-1] == PLACEHOLDER:
                    if chunk.draft_tokens:
                        sequence.accept(chunk.draft_tokens[: chunk.num_accepted], token)
                        self._roll_back(chunk)
                    else:
                        sequence.resolve(token)
            # There is no call for most of a thousand sequences.
            if sequence.finish_reason is not None or (
                naming and sequence.num_computed >= (sequence.num_named + 1) * block_size
            ):
                self._settle(sequence)

    def _roll_back(self, chunk: Chunk) -> None:
        """Have a sequence whose states have seen rejected draft tokens compute the others again, from the states before."""
        sequence = chunk.sequence
        rejected = chunk.num_accepted < len(chunk.draft_tokens)
        if rejected and sequence.backup != NO_SLOT and sequence.phase is Phase.RUNNING:
            sequence.num_computed, sequence.snapshot = chunk.start, sequence.backup

    def _settle(self, sequence: Sequence) -> None:
        """Name the KV blocks of a sequence that are full, and remove it if it has ended."""
        self.prefix_cache.name_blocks(sequence)
        if sequence.finish_reason is not None and sequence.phase is not Phase.FINISHED:
            self._remove(sequence)

    def alive(self, step: Step) -> Step:
        """A step without the sequences that have ended since it was scheduled."""
        finished = Phase.FINISHED
        chunks = [chunk for chunk in step.chunks if chunk.sequence.phase is not finished]
        return step if len(chunks) == len(step.chunks) else Step(chunks)

    def finish(self, request_id: str, reason: FinishReason) -> Sequence | None:
        """End a sequence now, whatever its phase, and free its blocks; None when the id is unknown."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            sequence.finish_reason = reason
            if reason == "error":
                # What failed may have written wrong keys and values.
                self._blocks.forget(sequence.blocks)
            self._remove(sequence)
        return sequence

    def _add_decoding(self, step: Step) -> list[Sequence]:
        """Add the sequences that have one token to compute, with the block that it needs; gives those that have more."""
        prefilling = list[Sequence]()
        running, block_size = Phase.RUNNING, self._blocks.block_size
        # Making room for one may preempt others. There is no call for most of a thousand sequences.
        for sequence in [*self._running]:
            tokens, computed = sequence.tokens, sequence.num_computed
            count = len(tokens)
            if count > computed + 1:
                prefilling.append(sequence)
            elif (
                count > computed
                and sequence.phase is running
                # Behind a token that is not known yet there is another one unless that is the last.
                and (tokens[-1] != PLACEHOLDER or count < sequence.max_length)
                and (count <= len(sequence.blocks) * block_size or self._make_room(sequence, step))
            ):
                step.chunks.append(Chunk(sequence, computed, 1, True))
        return prefilling

    def _admit(self, sequence: Sequence) -> bool:
        if len(self._running) >= self._max_num_seqs:
            return False
        found = self.prefix_cache.find(sequence)
        needed = self._blocks.missing(found, len(sequence.tokens)) + self._blocks.num_unheld(found)
        # Each running sequence keeps a spare block, or the admission would at once cause a preemption.
        if needed > self._blocks.num_free - len(self._running) and self._running:
            return False
        self._blocks.share(found)
        self.prefix_cache.begin(sequence, found)
        self._blocks.grow(sequence.blocks, len(sequence.tokens))
        sequence.take_row(self._tables)
        if self._backups:
            sequence.backup = self._backups[sequence.row]
        sequence.phase = Phase.RUNNING
        self._running.append(sequence)
        return True

    def _make_room(self, sequence: Sequence, step: Step) -> bool:
        """Take the block that the sequence's next token needs; False when the sequence itself had to be preempted."""
        while self._blocks.missing(sequence.blocks, len(sequence.tokens)) > self._blocks.num_free:
            newest = self._running[-1]
            self._preempt(newest)
            step.preempted.append(newest)
            if newest is sequence:
                return False
        self._grow(sequence, len(sequence.tokens))
        return True

    def _grow(self, sequence: Sequence, count: int) -> None:
        """Take the blocks that a running sequence lacks for so many tokens."""
        self._blocks.grow(sequence.blocks, count)
        self._tables.extend(sequence.row, sequence.blocks)

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.num_preemptions += 1
        self._release(sequence)
        sequence.num_computed = sequence.num_named = 0
        sequence.phase = Phase.WAITING
        self._waiting.appendleft(sequence)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.RUNNING:
            self._running.remove(sequence)
        elif sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
        self._release(sequence)
        sequence.phase = Phase.FINISHED
        del self._by_id[sequence.request_id]

    def _release(self, sequence: Sequence) -> None:
        """Give back all that a sequence holds."""
        self.prefix_cache.drop(sequence)
        self._blocks.release(sequence.blocks)
        sequence.give_row_back()
