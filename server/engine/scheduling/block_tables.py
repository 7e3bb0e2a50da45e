"""Running sequences' KV blocks as one array, written where a sequence takes a block and read by every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class BlockTables:
    """A row of int32 block numbers for each running sequence: row r holds the blocks [:counts[r]] of its holder.

    A row only grows while it has one holder; entries beyond its count are of earlier holders, or 0. While changes is the
    same, no entry is new. Only the methods here write to the arrays.
    """

    def __init__(self, rows: int, width: int) -> None:
        """rows: the most sequences at a time. width: the most blocks of one."""
        self.blocks: npt.NDArray[np.int32] = np.zeros((rows, width), np.int32)
        """[rows, width]."""
        self.counts: npt.NDArray[np.int64] = np.zeros(rows, np.int64)
        """[rows]: blocks of each row's holder."""
        self.holders: npt.NDArray[np.int64] = np.zeros(rows, np.int64)
        """[rows]: how many sequences have held the row, so that two holders of a row can be told apart."""
        self.changes = 0
        """Number of times that a row has got blocks or another holder."""
        self._free = list(range(rows - 1, -1, -1))

    def take(self, blocks: Sequence[int]) -> int:
        """Give a row to a sequence that holds these blocks. Raises IndexError when all rows are taken."""
        row = self._free.pop()
        self.holders[row] += 1
        self.counts[row] = 0
        self.changes += 1
        self.extend(row, blocks)
        return row

    def extend(self, row: int, blocks: Sequence[int]) -> None:
        """Write all blocks of a row's holder that are behind those it had; blocks are all of its blocks."""
        had, has = int(self.counts[row]), len(blocks)
        if had == has:
            return
        self.changes += 1
        self.blocks[row, had:has] = blocks[had:]
        self.counts[row] = has

    def copy(self, row: int, holder: int, first: int, blocks: npt.NDArray[np.int32]) -> None:
        """Write what a row of other tables has from its block `first` on; holder: how many have held it there."""
        end = first + len(blocks)
        self.blocks[row, first:end] = blocks
        self.holders[row], self.counts[row] = holder, end
        self.changes += 1

    def give_back(self, row: int) -> None:
        """Let another sequence have a row."""
        self._free.append(row)


class CopiedTables:
    """What a copy of block tables has of each row, elsewhere: whose blocks, and how many."""

    def __init__(self) -> None:
        self._tables: BlockTables | None = None
        self._counts = self._holders = np.zeros(0, np.int64)

    def take_new(self, tables: BlockTables, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """What the copy lacks of some rows, copied from now on: int64 [4, rows], row, holder, first new block, blocks."""
        if tables is not self._tables:
            self._tables = tables
            self._counts, self._holders = np.zeros_like(tables.counts), np.zeros_like(tables.holders)
        holders, has = tables.holders[rows], tables.counts[rows]
        had = np.where(self._holders[rows] == holders, self._counts[rows], 0)
        self._holders[rows], self._counts[rows] = holders, has
        new = np.flatnonzero(has > had)
        return np.stack((rows[new], holders[new], had[new], has[new]))

    def forget(self) -> None:
        """Let nothing count as copied."""
        self._tables = None
