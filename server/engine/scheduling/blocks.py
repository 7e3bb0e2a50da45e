"""The pool of KV blocks: how many sequences hold each block, and which keys and values free blocks still have."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import cast


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free."""


class BlockManager:
    """num_blocks KV blocks of block_size tokens each, numbered from 0.

    A block may be held more than once (a shared prefix); it is free when nobody holds it. A block may be named by a key
    that says what it holds; it can be found by it, free or not, until it is handed out anew. Blocks without a key are
    handed out first, then those that have been free for longest.
    """

    on_forget: Callable[[bytes], None] | None = None
    """Called with each key that is taken away from its block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))
        self._free_named: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self.uses = [0] * num_blocks
        """Number of times that each block has been handed out."""

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._free_named)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def missing(self, blocks: list[int], num_tokens: int) -> int:
        """Number of blocks that a holder of `blocks` lacks to hold num_tokens tokens."""
        return max(0, self.blocks_for(num_tokens) - len(blocks))

    def grow(self, blocks: list[int], num_tokens: int) -> None:
        """Extend `blocks` in place until it holds num_tokens tokens; OutOfBlocksError (nothing taken) if it cannot."""
        missing = self.missing(blocks, num_tokens)
        if missing > self.num_free:
            raise OutOfBlocksError(f"{missing} blocks asked for, {self.num_free} free")
        for _ in range(missing):
            blocks.append(self.take())

    def take(self) -> int:
        """Hand out a free block; there has to be one."""
        block = self._free.popleft() if self._free else self._evict()
        self._references[block] = 1
        self.uses[block] += 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more holder of blocks that are held, or free but named."""
        held = list(blocks)
        free = [block for block in held if not self._references[block]]
        if not all(map(self._free_named.__contains__, free)):
            raise ValueError("a free block without a key cannot be shared")
        for block in free:
            self._free_named.pop(block, None)
        for block in held:
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Give back every block in `blocks` and empty the list."""
        # Last first: the front of a sequence is what another sequence may share, so it should be reused last.
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise ValueError(f"block {block} is not held")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._free_named[block] = None
        blocks.clear()

    def name(self, block: int, key: bytes) -> None:
        """Say what a held block holds from now on. A key that names another block stays with that one."""
        if self._references[block] < 1:
            raise ValueError(f"block {block} is not held")
        if self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks that the first keys name, up to the first key that names none."""
        found = [*map(self._by_key.get, keys)]
        known = found.index(None) if None in found else len(found)
        return cast(list[int], found[:known])

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """Number of blocks that share() would take from the free ones."""
        return sum(map(self._free_named.__contains__, blocks))

    def forget(self, blocks: Iterable[int]) -> None:
        """Take the keys of held blocks away: what they hold is not to be used again."""
        for block in blocks:
            key, self._keys[block] = self._keys[block], None
            if key is not None:
                del self._by_key[key]
                if self.on_forget is not None:
                    self.on_forget(key)

    def _evict(self) -> int:
        block, _ = self._free_named.popitem(last=False)
        self.forget([block])
        return block
