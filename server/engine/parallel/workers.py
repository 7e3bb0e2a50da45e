"""The engine's workers: the processes of ranks 1 to N - 1, told what they compute and of every step, watched and ended.

Rank 0 is the engine's own process. An engine lives or ends as a whole: where a worker dies, says nothing any more, or
holds up a step, the engine's process ends too, and the API's starts a new one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

from server.config import EngineConfig
from server.engine.parallel.messages import (
    FromWorker,
    StepWriter,
    StopWorker,
    ToWorker,
    WorkerBeat,
    WorkerFailed,
    WorkerReady,
    WorkerSetup,
    WriteAdapter,
)
from server.engine.parallel.processes import kill
from server.engine.runtime.exchange import ENVIRONMENT, Membership
from server.engine.runtime.graphs.launched_step import Launch
from server.engine.runtime.step_input import StepInput

logger = logging.getLogger(__name__)

# A worker that is silent for this long, once it is ready, has stopped or hangs.
SILENCE_S = 6.0
# A step on a GPU that takes longer waits in an exchange for a rank that does not come.
STEP_S = {"cuda": 9.0, "cpu": 300.0}
END_GRACE_S = 2.0
_POLL_MS = 250
_SETTLE_S = 0.2
_EXPLAIN_S = 1.0

Failed = Callable[[str, bool], None]
"""Called once, from a thread, with why the workers cannot go on and whether a new start is pointless."""


class Workers:
    """The processes of ranks 1 to N - 1; start_workers() makes them. Use from the engine's thread only."""

    def __init__(self, folder: Path, processes: list[subprocess.Popen[bytes]], failed: Failed, device: str) -> None:
        self._folder = folder
        self._processes = processes
        self._failed = failed
        self._step_s = STEP_S.get(device, STEP_S["cpu"])
        self._writer = StepWriter()
        self._encoder = msgspec.msgpack.Encoder()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._sockets = []
        for rank in range(1, len(processes) + 1):
            socket = context.socket(zmq.PUSH)
            socket.set_hwm(0)
            socket.linger = 0
            socket.bind(_address(folder, f"rank-{rank}"))
            self._sockets.append(socket)
        self._reports = context.socket(zmq.PULL)
        self._reports.set_hwm(0)
        self._reports.bind(_address(folder, "reports"))
        self._ready = {rank: threading.Event() for rank in range(1, len(processes) + 1)}
        self._heard: dict[int, float] = {}
        self._waiting_since: float | None = None
        self._ending = threading.Event()
        self._memory = dict.fromkeys(self._ready, (0, 0))
        self._watcher = threading.Thread(target=self._watch, name="workers-watcher", daemon=True)
        self._watcher.start()

    @property
    def membership(self) -> Membership:
        """The engine's own process."""
        return Membership(0, len(self._processes) + 1, str(self._folder / "store"))

    def device_memory(self) -> list[tuple[int, int]]:
        """(bytes used, bytes) of the workers' devices, from rank 1 on, as of a second ago."""
        return list(self._memory.values())

    def wait_ready(self) -> None:
        """Wait until all workers wait for steps; one that fails ends the engine meanwhile."""
        for ready in self._ready.values():
            ready.wait()

    def compute(self, given: StepInput, launch: Launch | None = None) -> None:
        """Have the workers compute a step, and sample its tokens if launch says how."""
        self._send(self._writer.write(given, launch))

    def write_adapter(self, slot: int, path: str) -> None:
        """Have the workers load the LoRA adapter in a folder, before the steps that come after."""
        self._send(WriteAdapter(slot, path))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While entered, the engine's thread computes a step or waits for it; if that takes too long, an exchange hangs."""
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = None

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A step of the engine. Where it fails, the thread that watches the workers has a moment to say why.

        It is mostly an exchange that fails, which another rank has left; that thread then ends this process.
        """
        try:
            yield
        except Exception:
            self._watcher.join(_EXPLAIN_S)
            raise

    def end(self) -> None:
        """Let the workers end, then kill those that have not."""
        self._ending.set()
        self._watcher.join()
        with contextlib.suppress(zmq.ZMQError):
            self._send(StopWorker())
        deadline = time.monotonic() + END_GRACE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for socket in (*self._sockets, self._reports):
            socket.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, message: ToWorker) -> None:
        data = self._encoder.encode(message)
        for socket in self._sockets:
            socket.send(data, zmq.DONTWAIT)

    def _watch(self) -> None:
        """Run in a thread: hear the workers, and say so when they cannot go on."""
        decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
        while not self._ending.is_set():
            failure: tuple[str, bool] | None = None
            while self._reports.poll(0 if failure else _POLL_MS):
                failure = self._hear(decoder.decode(self._reports.recv())) or failure
            if failure is not None and not failure[1]:
                # A rank that fails in an exchange mostly does so because another one has died.
                self._ending.wait(_SETTLE_S)
                failure = self._dead() or failure
            failure = failure or self._silent()
            if failure is not None and not self._ending.is_set():
                for process in self._processes:
                    process.kill()
                self._failed(*failure)
                return

    def _hear(self, message: FromWorker) -> tuple[str, bool] | None:
        self._heard[message.rank] = time.monotonic()
        match message:
            case WorkerReady(rank):
                self._ready[rank].set()
            case WorkerBeat(rank, used, total):
                self._memory[rank] = used, total
            case WorkerFailed(rank, reason, fatal):
                return reason if fatal else f"rank {rank} failed: {reason}", fatal
        return None

    def _silent(self) -> tuple[str, bool] | None:
        """Why the workers cannot go on, where one has ended or is silent without having said so."""
        if dead := self._dead():
            return dead
        now = time.monotonic()
        for rank in self._ready:
            if self._ready[rank].is_set() and now - self._heard[rank] > SILENCE_S:
                return f"rank {rank} has been silent for {SILENCE_S:.0f} s", False
        since = self._waiting_since
        if since is not None and now - since > self._step_s:
            return f"a step has taken more than {self._step_s:.0f} s: a rank hangs", False
        return None

    def _dead(self) -> tuple[str, bool] | None:
        """Worker that has ended."""
        ended = _first_ended(self._processes)
        return None if ended is None else (ended, False)


def _first_ended(processes: list[subprocess.Popen[bytes]]) -> str | None:
    """Rank that has ended, one that was killed before one that failed, and its end; None if all run."""
    codes = {rank: process.poll() for rank, process in enumerate(processes, 1)}
    ended = sorted((code, rank) for rank, code in codes.items() if code is not None)
    for code, rank in ended:
        return f"rank {rank} ended: {f'killed by signal {-code}' if code < 0 else f'exit code {code}'}"
    return None


def start_workers(
    checkpoint_folder: Path,
    config: EngineConfig,
    processes: list[subprocess.Popen[bytes]],
    device: str,
    failed: Failed,
) -> Workers:
    """Make ranks 1 to N - 1 of the processes of start_processes().

    Raises OSError, with all of them killed; ChildProcessError where one of them has ended already.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="nf4-ranks-"))
        for rank, process in enumerate(processes, 1):
            setup = WorkerSetup(
                rank,
                len(processes) + 1,
                str(folder / "store"),
                _address(folder, f"rank-{rank}"),
                _address(folder, "reports"),
                str(checkpoint_folder),
                config.model_dump(mode="json"),
            )
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(setup) + b"\n")
            process.stdin.flush()
    except BaseException as e:
        if isinstance(e, BrokenPipeError):
            with contextlib.suppress(subprocess.TimeoutExpired):  # its input is closed, so it is about to end
                process.wait(END_GRACE_S)
        ended = _first_ended(processes)
        kill(processes)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if ended is not None:
            raise ChildProcessError(ended) from e
        raise
    return Workers(folder, processes, failed, device)


def _address(folder: Path, name: str) -> str:
    return f"ipc://{folder}/{name}"
