"""The pool of key/value cache blocks: who holds which block, counted by references."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free."""


class BlockManager:
    """num_blocks blocks of block_size tokens each, numbered from 0.

    A block may be held more than once (a shared prefix); it is free when nobody holds it. Blocks that were freed last
    are handed out last, so what they hold stays reusable for as long as possible.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def missing(self, blocks: list[int], num_tokens: int) -> int:
        """How many blocks a holder of `blocks` lacks to hold num_tokens tokens."""
        return max(0, self.blocks_for(num_tokens) - len(blocks))

    def grow(self, blocks: list[int], num_tokens: int) -> None:
        """Extend `blocks` in place until it holds num_tokens tokens; OutOfBlocksError (nothing taken) if it cannot."""
        missing = self.missing(blocks, num_tokens)
        if missing > len(self._free):
            raise OutOfBlocksError(f"{missing} blocks asked for, {len(self._free)} free")
        for _ in range(missing):
            block = self._free.popleft()
            self._references[block] = 1
            blocks.append(block)

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more holder of blocks that are already held."""
        held = list(blocks)
        if not all(self._references[block] for block in held):
            raise ValueError("a free block cannot be shared")
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
                self._free.append(block)
        blocks.clear()
