"""Replicas that have a prompt's beginning in their KV cache, as far as one router has sent it there."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence

import msgspec

BLOCK_BYTES = 128
MOST_BLOCKS = 256
# Fields of a body that come before the prompt's own text in every dialect: what changes one changes the prompt's beginning.
_FIELDS = ("model", "tools", "system", "instructions")
_PROMPTS = ("messages", "prompt", "input")


def beginnings(body: bytes) -> tuple[bytes, ...]:
    """Hashes of the prompt's first 1, 2, ... blocks of BLOCK_BYTES, each over all that is before it.

    Empty for what is no JSON object with a prompt; the replica will say what is wrong with it.
    """
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return ()
    if not isinstance(document, dict):
        return ()
    prompts = [document[name] for name in _PROMPTS if name in document]
    if not prompts:
        return ()
    text = msgspec.json.encode([[document.get(name) for name in _FIELDS], *prompts])[: BLOCK_BYTES * MOST_BLOCKS]
    chain = hashlib.blake2b(digest_size=16)
    found = []
    for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        chain.update(text[start : start + BLOCK_BYTES])
        found.append(chain.digest())
    return tuple(found)


class Beginnings:
    """Replicas to which beginnings were sent last; the oldest of more than capacity are forgotten."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._replicas: OrderedDict[bytes, str] = OrderedDict()
        self._counts: Counter[str] = Counter()

    def record(self, blocks: Sequence[bytes], replica: str) -> None:
        """Remember that a prompt with these beginnings went to replica."""
        for block in blocks:
            if (before := self._replicas.get(block)) is not None:
                self._counts[before] -= 1
            self._counts[replica] += 1
            self._replicas[block] = replica
            self._replicas.move_to_end(block)
        while len(self._replicas) > self._capacity:
            _, forgotten = self._replicas.popitem(last=False)
            self._counts[forgotten] -= 1

    def count(self, replica: str) -> int:
        """Number of remembered blocks that were sent to replica last."""
        return self._counts[replica]

    def find(self, blocks: Sequence[bytes], replicas: Collection[str]) -> tuple[str | None, int]:
        """The one of replicas that got the longest of these beginnings, and how many blocks that is."""
        for count in range(len(blocks), 0, -1):
            replica = self._replicas.get(blocks[count - 1])
            if replica is not None and replica in replicas:
                return replica, count
        return None, 0
