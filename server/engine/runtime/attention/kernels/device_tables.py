"""A copy of the block tables on the device, which gets what is new in them before each step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from server.engine.runtime.batch import Spans, to_device
from server.engine.scheduling.block_tables import BlockTables, CopiedTables

_NOTHING = np.zeros((2, 0), np.int64)


class DeviceTables:
    """int32 [rows + 1, width] in memory that never moves; the last row is padding's, one scratch block."""

    def __init__(self, rows: int, width: int, scratch_block: int, device: torch.device) -> None:
        self.blocks = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        self.blocks[rows] = scratch_block
        self.padding_row = rows
        self._copied = CopiedTables()
        # The tables and rows that were looked at last, and the tables' changes then.
        self._seen: tuple[BlockTables | None, bytes, int] = None, b"", -1

    def update(self, spans: Spans) -> None:
        """Make the rows of a step's sequences equal to their block tables, as far as the step needs them.

        Nothing waits for the device: kernels launched earlier see the rows as they were, later ones as they are.
        """
        new = self.take_new(spans)
        if not new.shape[1]:
            return
        try:
            given = to_device(new, self.blocks.device)
            self.blocks.view(-1).index_copy_(0, given[0], given[1].int())
        except Exception:
            self._copied.forget()
            self._seen = None, b"", -1
            raise

    def take_new(self, spans: Spans) -> npt.NDArray[np.int64]:
        """Take what the copy lacks: int64 [2, new], places in the flat copy and their blocks. It counts as copied then."""
        tables, rows = spans.tables, spans.rows
        if len(rows) > 1:
            # Each token of a step with draft tokens is a span, beside those of the same sequence.
            differs = np.empty(len(rows), bool)
            differs[0] = True
            np.not_equal(rows[1:], rows[:-1], out=differs[1:])
            rows = rows[differs]
        seen = tables, rows.tobytes(), tables.changes
        if seen == self._seen:
            return _NOTHING
        self._seen = seen
        width, places, blocks = self.blocks.shape[1], [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        for row, _, first, end in self._copied.take_new(tables, rows).T.tolist():
            places.append(np.arange(row * width + first, row * width + end))
            blocks.append(tables.blocks[row, first:end])
        return np.stack((np.concatenate(places), np.concatenate(blocks)))
