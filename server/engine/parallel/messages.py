"""Messages between the engine's process and its workers.

A step is one message: its chunks in columns, and of the block tables only what is new since the step before. A worker
keeps block tables of its own up to date with that.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from server.engine.runtime.graphs.launched_step import Launch
from server.engine.runtime.image_rows import ImageRows
from server.engine.runtime.step_input import StepInput
from server.engine.scheduling.block_tables import BlockTables, CopiedTables


class WorkerSetup(msgspec.Struct, frozen=True):
    """First line of a worker's standard input, whose end means that the engine's process is gone."""

    rank: int
    count: int
    store: str
    """The file in which the ranks find one another; see exchange.Membership."""
    to_worker: str
    """Address where the worker receives ToWorker messages."""
    from_worker: str
    """Address where it sends FromWorker messages."""
    checkpoint_folder: str
    engine: dict[str, Any]
    """EngineConfig, dumped."""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """A Launch as a message; table is None or the bytes of a float64 [rows, 6]."""

    follows: bool
    source: list[int] | None
    table: bytes | None


class StepImages(msgspec.Struct, frozen=True, array_like=True):
    """An ImageRows without what only rank 0 has, as a message. Columns are bytes of int32."""

    rows: bytes
    layers: int
    axes: bytes
    """[2, chunks]: first row and tokens of each chunk whose positions differ by axis."""
    positions: bytes
    """[3, tokens]: their positions, one chunk after another."""
    seen: bytes | None

    @classmethod
    def of(cls, images: ImageRows) -> StepImages:
        """The message of a step's images."""
        axes = np.array([(row, own.shape[1]) for row, own in images.axes], np.int64).reshape(-1, 2)
        positions = np.concatenate([np.zeros((3, 0), np.int64), *(own for _, own in images.axes)], axis=1)
        seen = None if images.seen is None else _bytes(images.seen)
        return cls(_bytes(images.rows), images.layers, _bytes(axes.T), _bytes(positions), seen)

    def read(self) -> ImageRows:
        """The step's images."""
        positions = _numbers(self.positions).reshape(3, -1)
        axes, begin = [], 0
        for row, count in _numbers(self.axes).reshape(2, -1).T.tolist():
            axes.append((row, positions[:, begin : begin + count]))
            begin += count
        seen = None if self.seen is None else _numbers(self.seen).reshape(2, -1)
        return ImageRows(_numbers(self.rows), (), axes, seen, self.layers)


class ComputeStep(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Engine to worker: compute a step. Columns are bytes of int32."""

    chunks: bytes
    """[3, sequences]: row of the block tables, first token, tokens."""
    ids: bytes
    wanted: bytes
    adapters: list[int | None] | None
    """None: no sequence has one."""
    changed: bytes
    """[4, rows]: rows of the block tables that are new in part: row, holder, first new block, blocks."""
    blocks: bytes
    """The new blocks of the changed rows, one row after another."""
    sampling: Sampling | None = None
    """Way in which the worker samples the tokens itself; None: the engine does."""
    offsets: bytes | None = None
    """[sequences]: what positions are more than places; None: nothing."""
    images: StepImages | None = None
    """The images in the chunks, whose features rank 0 broadcasts."""
    hidden: bool = False
    """Whether final hidden states are computed in the place of logits."""
    restored: list[tuple[int, int]] = []
    """Slots of states to copy before the step: from, to."""
    saved: list[tuple[int, int]] = []
    """Slots of states to copy after the step."""


class WriteAdapter(msgspec.Struct, frozen=True, array_like=True, tag="adapter"):
    """Engine to worker: load the LoRA adapter in a folder into a slot."""

    slot: int
    path: str


class StopWorker(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Engine to worker: end."""


class WorkerReady(msgspec.Struct, frozen=True, tag="ready"):
    """Worker to engine: it waits for steps."""

    rank: int


class WorkerBeat(msgspec.Struct, frozen=True, tag="beat"):
    """Worker to engine, every second once it is ready: it lives, and this much of its device's memory is used."""

    rank: int
    memory_used: int
    memory_total: int


class WorkerFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Worker to engine: it ends; fatal as of EngineFailed."""

    rank: int
    message: str
    fatal: bool = False


ToWorker = ComputeStep | WriteAdapter | StopWorker
FromWorker = WorkerReady | WorkerBeat | WorkerFailed


class StepWriter:
    """Makes messages of steps; it knows what of the block tables has been sent."""

    def __init__(self) -> None:
        self._sent = CopiedTables()

    def write(self, given: StepInput, launch: Launch | None) -> ComputeStep:
        """The message of a step; its part of the block tables counts as sent."""
        tables, rows = given.tables, given.rows
        changed = self._sent.take_new(tables, rows)
        blocks = [tables.blocks[row, first:end] for row, _, first, end in changed.T.tolist()]
        adapted = given.adapters.count(None) < len(given.adapters)
        sampling = None
        if launch is not None:
            table = None if launch.table is None else launch.table.tobytes()
            sampling = Sampling(launch.follows, launch.source, table)
        return ComputeStep(
            _bytes(np.stack((rows, given.starts, given.lengths))),
            _bytes(np.array(given.ids)),
            _bytes(given.wanted),
            list(given.adapters) if adapted else None,
            _bytes(changed),
            b"".join(part.tobytes() for part in blocks),
            sampling,
            None if given.offsets is None else _bytes(given.offsets),
            None if given.images is None else StepImages.of(given.images),
            given.hidden,
            list(given.restored),
            list(given.saved),
        )


class StepReader:
    """Reads messages of steps in the order in which a StepWriter made them."""

    def __init__(self, rows: int, width: int) -> None:
        """rows, width: those of the engine's block tables."""
        self._tables = BlockTables(rows, width)

    def read(self, message: ComputeStep) -> tuple[StepInput, Launch | None]:
        """The step, and how its tokens are sampled where the worker samples them."""
        tables = self._tables
        new, place = np.frombuffer(message.blocks, np.int32), 0
        for row, holder, first, end in _numbers(message.changed).reshape(4, -1).T.tolist():
            tables.copy(row, holder, first, new[place : place + end - first])
            place += end - first
        rows, starts, lengths = _numbers(message.chunks).reshape(3, -1)
        adapters = [None] * len(rows) if message.adapters is None else message.adapters
        ids, wanted = _numbers(message.ids).tolist(), _numbers(message.wanted)
        launch, sampling = None, message.sampling
        if sampling is not None:
            table = None if sampling.table is None else np.frombuffer(bytearray(sampling.table)).reshape(-1, 6)
            launch = Launch(sampling.follows, sampling.source, table)
        offsets = None if message.offsets is None else _numbers(message.offsets)
        images = None if message.images is None else message.images.read()
        columns = rows, starts, lengths, ids, wanted, adapters, offsets
        copies = message.restored, message.saved
        return StepInput(tables, *columns, images, message.hidden, *copies), launch


def _bytes(numbers: npt.NDArray[np.int64]) -> bytes:
    return numbers.astype(np.int32).tobytes()


def _numbers(data: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(data, np.int32).astype(np.int64)
