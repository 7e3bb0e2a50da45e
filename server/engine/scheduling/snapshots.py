"""Snapshots of states: copies of what layers keep of a sequence at the end of a KV block, with which later ones begin."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items

from server.engine.scheduling.sequence import Sequence

NO_SLOT = -1
_LEAST_TOKENS_AFTER = 5
"""Tokens of a prompt after its last snapshot, at least.

The next turn's prompt has them in another form: chat templates end prompts with the beginning of an answer, such as an empty
block of reasoning, and leave that out of earlier turns.
"""
_SHARE_OF_ONE = 4
"""One prompt takes at most one in so many of the snapshots at regular distances."""


class Snapshots:
    """Slots of a pool of states, each of which holds a snapshot, is being written, or is free.

    A snapshot is found by the key of the KV block that ends where it was taken. Where no slot is free, the snapshot that has
    not been used for longest goes.
    """

    def __init__(self, slots: Items[int], distance: int, block_size: int) -> None:
        """distance: tokens of a prompt between two snapshots. Raises ValueError if that is no multiple of block_size."""
        if distance % block_size:
            raise ValueError(f"snapshots of states every {distance} tokens do not end with blocks of {block_size}")
        self.count = len(slots)
        """Slots."""
        self.hits = 0
        """Sequences that began with a snapshot."""
        self._free = [*slots]
        self._by_key: OrderedDict[bytes, int] = OrderedDict()
        # Keys of KV blocks that another block was named behind.
        self._continued: set[bytes] = set()
        self._distance = distance
        self._block_size = block_size

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, keys: Items[bytes]) -> tuple[int, int]:
        """The most KV blocks, of those that the first keys name, at whose end there is a snapshot, and its slot.

        0 and NO_SLOT if there is none.
        """
        for count in range(len(keys), 0, -1):
            slot = self._by_key.get(keys[count - 1])
            if slot is not None:
                self._by_key.move_to_end(keys[count - 1])
                return count, slot
        return 0, NO_SLOT

    def take_for(self, sequence: Sequence, place: int) -> int:
        """take() for a snapshot at the end of a sequence's first `place` tokens, which a step is about to compute."""
        slot = self.take()
        sequence.saving = None if slot == NO_SLOT else (place, slot)
        return slot

    def note_named(self, sequence: Sequence, first: int) -> None:
        """Note that a sequence's KV blocks from `first` on are named, and name its snapshot, which has been written."""
        keys = sequence.block_keys(self._block_size, sequence.num_computed, max(first - 1, 0))
        self._continued.update(keys[:-1])
        if sequence.saving is not None:
            (tokens, slot), sequence.saving = sequence.saving, None
            self.name(slot, sequence.block_keys(self._block_size, tokens)[-1])

    def drop(self, sequence: Sequence) -> None:
        """Give back the slot of a sequence's snapshot that has not been named."""
        if sequence.saving is not None:
            self._free.append(sequence.saving[1])
            sequence.saving = None

    def is_branch(self, key: bytes) -> bool:
        """Whether a sequence whose blocks are known up to this one leaves another sequence there.

        A conversation's next turn leaves none: it goes on where the last one ended.
        """
        return key in self._continued

    def place_after(self, sequence: Sequence) -> int | None:
        """The first token of a sequence's prompt after those computed before which a snapshot is to be taken, if any.

        That is at regular distances, where another prompt branched off, and at the last block before the prompt's end.
        """
        if sequence.sampling.prompt_logprobs is not None:
            return None  # nobody shares its blocks
        size, computed = self._block_size, sequence.num_computed
        end = (sequence.num_prompt - _LEAST_TOKENS_AFTER) // size * size
        each = self._distance * max(1, self.count // _SHARE_OF_ONE)
        distance = self._distance * -(-sequence.num_prompt // each)
        places = sorted({(computed // distance + 1) * distance, sequence.branch, end})
        for place in places:
            if computed < place <= end and sequence.block_keys(size, place, place // size - 1)[0] not in self._by_key:
                return place
        return None

    def take(self) -> int:
        """A slot to write a snapshot to; NO_SLOT if all are being written."""
        if self._free:
            return self._free.pop()
        return self._by_key.popitem(last=False)[1] if self._by_key else NO_SLOT

    def name(self, slot: int, key: bytes) -> None:
        """Let a snapshot that has been written be found. One with the same key stays."""
        if key in self._by_key:
            self._free.append(slot)
        else:
            self._by_key[key] = slot

    def forget(self, key: bytes) -> None:
        """Drop the snapshot of a key, if there is one."""
        self._continued.discard(key)
        slot = self._by_key.pop(key, None)
        if slot is not None:
            self._free.append(slot)
