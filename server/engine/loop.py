"""The engine process: `python -m server.engine.loop`, whose input begins with an EngineSetup (supervisor.process).

It imports what an engine needs while it waits for the EngineSetup; with --standby it does so at the lowest priority.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from server import PACKAGE
from server.checkpoint.base import CheckpointError
from server.engine.channel import Channel, send_from_thread
from server.engine.imports import import_engine
from server.engine.parallel.processes import processes_of
from server.engine.permanence import is_permanent, is_refusal
from server.engine.supervisor.process import EngineSetup
from server.logs import set_up_logging
from server.objects import freeze_objects
from server.types import (
    AbortRequest,
    AdapterResult,
    EngineFailed,
    EngineReady,
    GenerateRequest,
    LoadAdapter,
    LoadProgress,
    RemoveClient,
    Shutdown,
    StepOutputs,
    UnloadAdapter,
)

if TYPE_CHECKING:
    from server.engine.core import Engine
    from server.engine.parallel.workers import Workers
    from server.engine.runtime.runner import ModelRunner

logger = logging.getLogger(f"{PACKAGE}.engine.loop")

IDLE_POLL_MS = 200
# While a thread reads an adapter the loop polls, because no socket tells when the thread is done.
READING_POLL_MS = 10
# After the API process has gone, a step in progress may take this long before the process just ends.
ORPHAN_GRACE_S = 10.0
# While a standby process imports, its session counts this little beside others (Linux groups threads by sessions, and
# their own priorities only count within one).
STANDBY_SESSION_NICENESS = 19


class _Stop:
    """Set by a Shutdown message or the end of the API process."""

    def __init__(self) -> None:
        self.requested = False

    def when_input_ends(self) -> None:
        """Run in a thread: standard input has ended when the API process has, however it did."""
        while os.read(0, 4096):
            pass
        self.requested = True
        time.sleep(ORPHAN_GRACE_S)
        os._exit(1)


def main() -> int:
    """Exit code 0 after Shutdown or the end of the API process; 1 when the engine failed."""
    # A service manager may signal all processes; the API process lets requests end, and then ends this one.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    options = _arguments()
    set_up_logging(options.log_level, options.log_format)
    _name_process("nf4-imports")
    imports, stand_by = import_engine, partial(_stand_by, options.standby)
    importing = threading.Thread(target=imports if options.standby is None else stand_by, name="import", daemon=True)
    importing.start()
    line = _first_line()
    _name_process("nf4-engine")
    stop = _Stop()
    setup = msgspec.json.decode(line, type=EngineSetup)
    threading.Thread(target=stop.when_input_ends, name="api-watcher", daemon=True).start()
    channel = Channel(setup)
    # Workers say in the log what they have to say, in the same way.
    logging_options = ["--log-level", options.log_level, "--log-format", options.log_format]
    try:
        return _run(setup, channel, stop, logging_options, importing)
    finally:
        channel.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m server.engine.loop", description=__doc__)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", choices=["console", "json"], default="console")
    parser.add_argument("--standby", type=int, help="a file descriptor that gets a byte when everything is imported")
    return parser.parse_args()


def _name_process(name: str) -> None:
    """Name of this process in ps and top (Linux; at most 15 letters)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def _stand_by(tells_imported: int) -> None:
    """Import what an engine needs, behind everything else that wants the cores, and tell."""
    with contextlib.suppress(OSError, AttributeError):
        # This thread's own policy; the engine's threads keep theirs.
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    _set_session_niceness(STANDBY_SESSION_NICENESS)
    import_engine()
    _set_session_niceness(0)
    _name_process("nf4-standby")
    with contextlib.suppress(OSError):
        os.write(tells_imported, b"\n")
    os.close(tells_imported)


def _set_session_niceness(niceness: int) -> None:
    """Set how much all processes of this session together count beside other sessions, where Linux groups threads so."""
    for _ in range(10):
        try:
            Path("/proc/self/autogroup").write_text(str(niceness))
        except BlockingIOError:  # the system takes one such change in a tenth of a second
            time.sleep(0.1)
        except OSError:
            return
        else:
            return


def _first_line() -> bytes:
    """One line of standard input, read unbuffered: the rest belongs to the thread that waits for its end."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(0, 1)
        if not data:  # the API process has ended; imports in a thread are not waited for
            os._exit(1)
        line += data
    return line


def _run(
    setup: EngineSetup, channel: Channel, stop: _Stop, logging_options: list[str], importing: threading.Thread
) -> int:
    try:
        _serve(setup, channel, stop, logging_options, importing)
    except Exception as e:
        fatal = is_refusal(e) or (not channel.said_ready and is_permanent(e))
        reason = (str(e).strip().splitlines() or ["no message"])[0]
        if fatal:  # the API process ends with the reason as its last line
            logger.debug("the engine cannot start", exc_info=e)
            folder = setup.checkpoint_folder
            told = f"{folder}: the start fails ({type(e).__name__}: {reason}); --log-level debug shows where"
            channel.send(EngineFailed(reason if is_refusal(e) else told, fatal))
        else:
            logger.exception("the engine failed")
            channel.send(EngineFailed(f"{type(e).__name__}: {reason}", fatal))
        return 1
    return 0


def _failed(setup: EngineSetup) -> Callable[[str, bool], None]:
    """Make what a thread calls when other ranks have failed: the engine's own thread may wait for them for ever."""

    def end(reason: str, fatal: bool) -> None:
        logger.error("the engine ends as a whole: %s", reason)
        send_from_thread(setup, EngineFailed(reason, fatal))
        os._exit(1)

    return end


def _serve(
    setup: EngineSetup, channel: Channel, stop: _Stop, logging_options: list[str], importing: threading.Thread
) -> None:
    def progress(stage: str, fraction: float) -> None:
        channel.send(LoadProgress(stage, fraction))

    progress("starting the engine", 0.0)
    config = setup.engine_config()
    processes = processes_of(config, logging_options)
    importing.join()
    # Here, because torch and transformers take seconds, in which the API should know that the engine is alive.
    from server.engine.core import Engine
    from server.engine.grammar import Grammars
    from server.engine.parallel.start import load_ranks

    folder, failed = Path(setup.checkpoint_folder), _failed(setup)
    runner, workers = load_ranks(folder, config, progress, failed, logging_options, processes)
    limits = runner.limits
    for adapter in setup.adapters:
        _restore_adapter(runner, adapter)
    end = limits.eos_token_ids[0] if limits.eos_token_ids else None
    grammars = Grammars(folder, limits.vocab_size, end)
    engine = Engine(runner, config, grammars, None if workers is None else workers.device_memory)
    freeze_objects()
    channel.send(
        EngineReady(
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            eos_token_ids=list(limits.eos_token_ids),
            block_size=config.block_size,
            num_blocks=limits.num_blocks,
            device=str(runner.device),
            tensor_parallel_size=1 if workers is None else workers.membership.count,
            dtype=str(runner.dtype).removeprefix("torch."),
            kernels=runner.kernels,
            expanded_weight_bytes=runner.expanded_weight_bytes,
            adapters=runner.adapters.names if runner.adapters else [],
            images=runner.tower is not None,
        )
    )
    channel.said_ready = True
    try:
        _run_steps(engine, runner, workers, channel, stop)
    finally:
        if workers is not None:
            workers.end()


def _run_steps(engine: Engine, runner: ModelRunner, workers: Workers | None, channel: Channel, stop: _Stop) -> None:
    from server.engine.contention import Barriers

    check_barriers = Barriers.checker(runner.device.type)
    while not stop.requested:
        aborted = False
        reading = runner.adapters is not None and runner.adapters.num_reading > 0
        for message in channel.receive(0 if engine.has_work else READING_POLL_MS if reading else IDLE_POLL_MS):
            match message:
                case GenerateRequest():
                    engine.add(message)
                case AbortRequest(request_ids):
                    engine.abort(request_ids)
                    aborted = True
                case RemoveClient(client):
                    engine.abort(channel.remove_client(client))
                    aborted = True
                case LoadAdapter():
                    _load_adapter(runner, message, channel)
                case UnloadAdapter(name):
                    if runner.adapters is not None:
                        runner.adapters.remove(name)
                case Shutdown():
                    stop.requested = True
        for result in engine.settle_adapters():
            channel.send(result)
        if engine.has_work and not stop.requested:
            check_barriers()
            with nullcontext() if workers is None else workers.explained():
                outputs = engine.step()
            channel.send_step(outputs)
        elif aborted:
            channel.send_step(StepOutputs([], engine.stats()))


def _load_adapter(runner: ModelRunner, request: LoadAdapter, channel: Channel) -> None:
    if runner.adapters is None:
        channel.send(AdapterResult(request.name, "this engine was started without adapters"))
    else:
        runner.adapters.read(request)


def _restore_adapter(runner: ModelRunner, request: LoadAdapter) -> None:
    """Load an adapter that the engine before this one had; one that has gone bad since must not stop the start."""
    if runner.adapters is None:
        return
    from server.checkpoint.lora import read_adapter

    try:
        weights = read_adapter(Path(request.path), runner.dtype)
        runner.adapters.put(request.name, weights, path=request.path)
    except CheckpointError as e:
        logger.error("an adapter loaded at run time is lost: %s", e)


if __name__ == "__main__":
    sys.exit(main())
