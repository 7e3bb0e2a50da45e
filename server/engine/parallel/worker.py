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
from pathlib import Path

import msgspec
import zmq

from server import PACKAGE
from server.engine.imports import import_bitsandbytes
from server.logs import set_up_logging
from server.objects import freeze_objects, lasting_objects

with lasting_objects():
    import_bitsandbytes()
    from server.config import EngineConfig
    from server.engine.parallel.messages import (
        ComputeStep,
        FromWorker,
        StepReader,
        StopWorker,
        ToWorker,
        WorkerBeat,
        WorkerFailed,
        WorkerReady,
        WorkerSetup,
        WriteAdapter,
    )
    from server.engine.permanence import is_refusal
    from server.engine.runtime.exchange import EXCHANGE_S, Membership, set_timeout
    from server.engine.runtime.limits import sequence_limit
    from server.engine.runtime.memory import MemoryGauge
    from server.engine.start import load_runner

logger = logging.getLogger(f"{PACKAGE}.engine.parallel.worker")

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
        self._lock = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(ToWorker)

    def send(self, message: FromWorker) -> None:
        """Send; never blocks."""
        with self._lock:
            self._reports.send(msgspec.msgpack.encode(message), zmq.DONTWAIT)

    def receive(self) -> ToWorker:
        """The next message; waits for it."""
        message: ToWorker = self._decoder.decode(self._steps.recv())
        return message

    def close(self) -> None:
        """Send what is queued, for a second at most, and close."""
        self._steps.close(linger=0)
        with self._lock:
            self._reports.close(linger=1000)
        zmq.Context.instance().term()


class _Worker:
    """A rank from its setup to its end."""

    def __init__(self, setup: WorkerSetup, wire: _Wire) -> None:
        self._setup = setup
        self._wire = wire
        self.is_ready = False
        """Whether it has begun to wait for steps."""

    def run(self) -> None:
        """Load the rank's shard, and compute steps until the engine's process says stop."""
        setup = self._setup
        config = EngineConfig.model_validate(setup.engine)
        membership = Membership(setup.rank, setup.count, setup.store)
        runner = load_runner(Path(setup.checkpoint_folder), config, lambda *_: None, membership)
        width = -(-runner.limits.max_model_len // config.block_size)
        reader = StepReader(sequence_limit(config, runner.device), width)
        set_timeout(EXCHANGE_S)
        freeze_objects()
        self._wire.send(WorkerReady(setup.rank))
        self.is_ready = True
        beat = threading.Thread(target=_beat, args=(setup.rank, runner.memory, self._wire), name="beat", daemon=True)
        beat.start()
        while True:
            match self._wire.receive():
                case ComputeStep() as message:
                    runner.compute_as_worker(*reader.read(message))
                case WriteAdapter(slot, path):
                    assert runner.adapters is not None
                    runner.adapters.write(slot, Path(path))
                case StopWorker():
                    return


def main() -> None:
    """Never returns: exit code 0 when the engine's process said stop, 1 when the worker failed."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the API process lets requests end, then the engine ends its workers
    parser = argparse.ArgumentParser(prog="python -m server.engine.parallel.worker", description=__doc__)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", choices=["console", "json"], default="console")
    options = parser.parse_args()
    set_up_logging(options.log_level, options.log_format)
    _end_with_parent()
    line = sys.stdin.buffer.readline()
    if not line:  # the engine's process has ended, or needs no ranks
        os._exit(1)
    setup = msgspec.json.decode(line, type=WorkerSetup)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"nf4-rank-{setup.rank}")
    threading.Thread(target=_end_with_input, name="engine-watcher", daemon=True).start()
    wire = _Wire(setup)
    worker = _Worker(setup, wire)
    code = 0
    try:
        worker.run()
    except Exception as e:
        code, fatal = 1, is_refusal(e) and not worker.is_ready
        reason = (str(e).strip().splitlines() or ["no message"])[0]
        if not fatal:
            logger.exception("rank %d failed", setup.rank)
            reason = f"{type(e).__name__}: {reason}"
        wire.send(WorkerFailed(setup.rank, reason, fatal))
    with contextlib.suppress(zmq.ZMQError):
        wire.close()
    # What torch does at its end would wait for the other ranks.
    os._exit(code)


def _beat(rank: int, memory: MemoryGauge, wire: _Wire) -> None:
    """Run in a thread: tell the engine's process that this one lives."""
    pause = threading.Event()
    with contextlib.suppress(zmq.ZMQError):  # it is closed
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
    main()
