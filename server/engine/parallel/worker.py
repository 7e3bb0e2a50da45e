"""A worker: `python -m server.engine.parallel.worker`, one rank of a model that several processes compute together.

Its input begins with a WorkerSetup. It computes the steps that the engine's process sends, and ends with that process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from server.config import EngineConfig
from server.engine.parallel.messages import (
    ComputeStep,
    FromWorker,
    StepReader,
    ToWorker,
    WorkerBeat,
    WorkerFailed,
    WorkerReady,
    WorkerSetup,
)
from server.engine.runtime.exchange import Membership
from server.engine.runtime.limits import sequence_limit
from server.engine.runtime.memory import MemoryGauge
from server.engine.start import load_runner
from server.logs import set_up_logging

logger = logging.getLogger("server.engine.parallel.worker")

BEAT_S = 1.0
_PR_SET_PDEATHSIG = 1


class _Wire:
    """A worker's sockets; send() may be called from any thread."""

    def __init__(self, setup: WorkerSetup) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._steps = context.socket(zmq.PULL)
        self._reports = context.socket(zmq.PUSH)
        for socket, address in ((self._steps, setup.to_worker), (self._reports, setup.from_worker)):
            socket.set_hwm(0)
            socket.connect(address)
        self._reports.linger = 1000
        self._lock = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(ToWorker)

    def send(self, message: FromWorker) -> None:
        """Send; never blocks."""
        with self._lock:
            self._reports.send(msgspec.msgpack.encode(message), zmq.DONTWAIT)

    def steps(self) -> Iterator[ComputeStep]:
        """Steps as they come, until the engine says stop."""
        while isinstance(message := self._decoder.decode(self._steps.recv()), ComputeStep):
            yield message


def main() -> int:
    """Exit code 0 when the engine's process said stop, 1 when the worker failed."""
    parser = argparse.ArgumentParser(prog="python -m server.engine.parallel.worker", description=__doc__)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", choices=["console", "json"], default="console")
    options = parser.parse_args()
    set_up_logging(options.log_level, options.log_format)
    _end_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the API process lets requests end, then the engine ends its workers
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSetup)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"nf4-rank-{setup.rank}")
    threading.Thread(target=_end_with_input, name="engine-watcher", daemon=True).start()
    wire = _Wire(setup)
    try:
        _run(setup, wire)
    except Exception as e:
        from server.engine.start import is_fatal

        reason = (str(e).strip().splitlines() or ["no message"])[0]
        if not is_fatal(e):
            logger.exception("rank %d failed", setup.rank)
            reason = f"{type(e).__name__}: {reason}"
        wire.send(WorkerFailed(setup.rank, reason, is_fatal(e)))
        zmq.Context.instance().term()
        # The other ranks may wait for this one in an exchange; what torch does at its end would wait for them.
        os._exit(1)
    os._exit(0)


def _run(setup: WorkerSetup, wire: _Wire) -> None:
    config = EngineConfig.model_validate(setup.engine)
    membership = Membership(setup.rank, setup.count, setup.store)
    runner = load_runner(Path(setup.checkpoint_folder), config, lambda *_: None, membership)
    width = -(-runner.limits.max_model_len // config.block_size)
    reader = StepReader(sequence_limit(config, runner.device), width)
    wire.send(WorkerReady(setup.rank))
    threading.Thread(target=_beat, args=(setup.rank, runner.memory, wire), name="beat", daemon=True).start()
    for message in wire.steps():
        runner.follow(*reader.read(message))


def _beat(rank: int, memory: MemoryGauge, wire: _Wire) -> None:
    """Run in a thread: tell the engine's process that this one lives."""
    pause = threading.Event()
    while not pause.wait(BEAT_S):
        wire.send(WorkerBeat(rank, *memory.read()))


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent has ended (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_input() -> None:
    """Run in a thread: standard input has ended when the engine's process has."""
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
