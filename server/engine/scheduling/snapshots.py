"""Snapshots of states: copies of what layers keep of a sequence at the end of a KV block, with which later ones begin."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
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


class SnapshotSlots:
    """Slots in one kind of memory, each of which holds a snapshot, is being written, or is free.

    A snapshot is found by the key of the KV block that ends where it was taken. Where no slot is free, the snapshot that has
    not been used for longest goes.
    """

    def __init__(self, slots: Items[int]) -> None:
        self.slots = slots
        self._free = [*slots]
        self._by_key: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def find(self, keys: Items[bytes]) -> tuple[int, int]:
        """The most KV blocks, of those that the first keys name, at whose end there is a snapshot, and its slot.

        0 and NO_SLOT if there is none.
        """
        # A history of 30,000 tokens has two thousand keys, for which a request waits.
        for count in range(len(keys) if self._by_key else 0, 0, -1):
            slot = self._by_key.get(keys[count - 1])
            if slot is not None:
                self._by_key.move_to_end(keys[count - 1])
                return count, slot
        return 0, NO_SLOT

    def take(self, held: Collection[int] = ()) -> int:
        """A slot to write a snapshot to, none of those held; NO_SLOT if all others are being written."""
        for slot in reversed(self._free):
            if slot not in held:
                self._free.remove(slot)
                return slot
        key = next((key for key, slot in self._by_key.items() if slot not in held), None)
        return NO_SLOT if key is None else self._by_key.pop(key)

    def give_back(self, slot: int) -> None:
        """Give back a slot whose snapshot has no name."""
        if slot != NO_SLOT:
            self._free.append(slot)

    def name(self, slot: int, key: bytes) -> None:
        """Let a snapshot that has been written be found. One with the same key stays."""
        if key in self._by_key:
            self.give_back(slot)
        elif slot != NO_SLOT:
            self._by_key[key] = slot

    def forget(self, key: bytes) -> None:
        """Drop the snapshot of a key, if there is one."""
        self.give_back(self._by_key.pop(key, NO_SLOT))


class Snapshots:
    """Snapshots in the device's memory and in the host's: each is written to both, and found where it still is."""

    def __init__(self, slots: Items[int], distance: int, block_size: int, host_slots: Items[int] = ()) -> None:
        """distance: tokens of a prompt between two snapshots. Raises ValueError if that is no multiple of block_size."""
        if distance % block_size:
            raise ValueError(f"snapshots of states every {distance} tokens do not end with blocks of {block_size}")
        self.on_device, self.on_host = SnapshotSlots(slots), SnapshotSlots(host_slots)
        self._count = max(len(slots), len(host_slots))
        self.hits = self.host_hits = 0
        """Sequences that began with a snapshot, and those of them whose snapshot only the host had."""
        # Keys of KV blocks that another block was named behind.
        self._continued: set[bytes] = set()
        self._held: dict[Sequence, int] = {}
        self._distance = distance
        self._block_size = block_size

    def find(self, keys: Items[bytes]) -> tuple[int, int]:
        """SnapshotSlots.find() in both memories, the device's first."""
        return max(self.on_device.find(keys), self.on_host.find(keys), key=lambda found: found[0])

    def hold(self, sequence: Sequence) -> None:
        """Keep the snapshot that a running sequence begins with until release(): its first chunk has to wait."""
        self._held[sequence] = sequence.snapshot

    def release(self, sequence: Sequence) -> None:
        """Hold no snapshot for a sequence."""
        self._held.pop(sequence, None)

    def note_hit(self, slot: int) -> None:
        """Count a sequence that begins with the snapshot in a slot."""
        self.hits += 1
        self.host_hits += slot in self.on_host.slots

    def take_for(self, sequence: Sequence, place: int) -> list[int]:
        """Take slots for a snapshot at the end of a sequence's first `place` tokens, which a step is about to compute."""
        held = self._held.values()
        slots = self.on_device.take(held), self.on_host.take(held)
        sequence.saving = place, *slots
        return [slot for slot in slots if slot != NO_SLOT]

    def note_named(self, sequence: Sequence, first: int) -> None:
        """Note that a sequence's KV blocks from `first` on are named, and name its snapshot, which has been written."""
        keys = sequence.block_keys(self._block_size, sequence.num_computed, max(first - 1, 0))
        self._continued.update(keys[:-1])
        if sequence.saving is not None:
            (tokens, *slots), sequence.saving = sequence.saving, None
            key = sequence.block_keys(self._block_size, tokens)[-1]
            for own, slot in zip((self.on_device, self.on_host), slots, strict=True):
                own.name(slot, key)

    def drop(self, sequence: Sequence) -> None:
        """Give back what is held for a sequence, and the slots of its snapshot that has not been named."""
        self.release(sequence)
        if sequence.saving is not None:
            (_, *slots), sequence.saving = sequence.saving, None
            for own, slot in zip((self.on_device, self.on_host), slots, strict=True):
                own.give_back(slot)

    def is_branch(self, key: bytes) -> bool:
        """Whether a sequence whose blocks are known up to this one leaves another sequence there.

        A conversation's next turn leaves none: it goes on where the last one ended.
        """
        return key in self._continued

    def place_after(self, sequence: Sequence) -> int | None:
        """The first token of a sequence's prompt after those computed before which a snapshot is to be taken, if any.

        That is where another prompt branched off, at the last block before the prompt's end, and at regular distances from
        the prefix that was found.
        """
        if sequence.sampling.prompt_logprobs is not None:
            return None  # nobody shares its blocks
        size, computed = self._block_size, sequence.num_computed
        end = (sequence.num_prompt - _LEAST_TOKENS_AFTER) // size * size
        each = self._distance * max(1, self._count // _SHARE_OF_ONE)
        distance = self._distance * -(-sequence.num_prompt // each)
        regular = computed + distance - (computed - sequence.num_cached) % distance
        places = sorted({regular, sequence.branch, end})
        for place in places:
            if computed < place <= end:
                key = sequence.block_keys(size, place, place // size - 1)[0]
                if key not in self.on_device and key not in self.on_host:
                    return place
        return None

    def forget(self, key: bytes) -> None:
        """Drop the snapshot of a key, if there is one."""
        self._continued.discard(key)
        self.on_device.forget(key)
        self.on_host.forget(key)
