"""Running sequences' KV blocks as one array, written where a sequence takes a block and read by every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class BlockTables:
    """A row of int32 block numbers for each running sequence: row r holds the blocks [:counts[r]] of its holder.

    A row only grows while it has one holder; entries beyond its count are of earlier holders, or 0. Who keeps a copy of
    the rows compares holders and counts with those that it has seen, and so learns which entries are new; while changes is
    the same, none is. Only the methods here write to the arrays.
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
