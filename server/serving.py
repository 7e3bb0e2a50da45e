"""Runs the application under uvicorn: the socket, what the terminal shows, signals, the exit status."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from server.api.answering.service import Service
from server.api.http.connection import limited
from server.api_processes.alone import Alone
from server.api_processes.group import Group
from server.api_processes.place import Place
from server.app import create_app
from server.config import Config, ConfigError, HttpConfig
from server.engine.supervisor.base import EngineStatus
from server.engine.supervisor.child import Child
from server.engine.supervisor.client import EngineClient
from server.engine.supervisor.steps import StartSteps
from server.logs import LogFormat

logger = logging.getLogger(__name__)

# Longer than the pools of the usual clients keep idle connections, so that it is they who close them.
KEEP_ALIVE_S = 75
ABORT_GRACE_S = 5
# The number of files that are open beside connections: sockets to the engine, its pipes, the log.
OTHER_FILES = 256
BACKLOG = 2048
STEP_LINES_S = 5.0
"""Seconds between two lines about a step of the start."""
INTERRUPTED = 128 + signal.SIGINT
"""The exit status that shells give to a process that SIGINT ended."""


def serve(config: Config, child: Child | None = None, place: Place | None = None) -> int:
    """Serve until a signal or a failure that starting again cannot mend; returns the exit status.

    child: the process for the engine, if it has been started. place: what this process and those that it starts share;
    None where it alone answers HTTP.
    """
    try:
        listening = _listen(config.http)
    except OSError as e:
        other = "; --port N takes another, --port 0 a free one" if e.errno == errno.EADDRINUSE else ""
        _complain(config, f"{config.http.host}:{config.http.port}: {e.strerror or e}{other}")
        return 1
    allow_connections(config.http.max_connections)
    url = _url(listening, secure=config.http.tls_cert_file is not None)
    terminal = Terminal(config.model_names[0 if config.served_model_name else -1], url, config.log_format)
    server: Server | None = None
    address = listening.family, listening.getsockname()

    def on_status(status: EngineStatus) -> None:
        if server is not None and server.should_exit:
            return  # what ends with the server is no failure
        terminal.show(status)
        if status.state == "failed" and server is not None:
            server.should_exit = True

    try:
        part = Alone(config, child) if place is None else Group(config, place, address, child)
        app = create_app(config, on_status, part)
    except ConfigError as e:
        _complain(config, str(e))
        return 1
    server = Server(uvicorn_config(config.http, app), app.state.service)
    try:
        server.config.load()
    except OSError as e:  # ssl.SSLError is one
        _complain(config, f"http.tls_cert_file, http.tls_key_file: {e}")
        return 1
    server.run(sockets=[listening])
    if terminal.failure is not None:
        _complain(config, terminal.failure)
        return 1
    return 0


def uvicorn_config(http: HttpConfig, app: FastAPI) -> uvicorn.Config:
    """uvicorn's configuration, in every API process."""
    service = app.state.service
    return uvicorn.Config(
        app,
        http=limited(http, service.counts, service.metrics.rejected),
        loop="auto",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        ssl_certfile=http.tls_cert_file,
        ssl_keyfile=http.tls_key_file,
        timeout_graceful_shutdown=int(http.drain_timeout_s) + ABORT_GRACE_S,
    )


def _complain(config: Config, reason: str) -> None:
    """Log why the server ends."""
    if config.log_format == "json":
        logger.critical(reason)
    else:
        print(f"error: {reason}", file=sys.stderr)


def _listen(http: HttpConfig) -> socket.socket:
    """A socket that takes connections. Raises OSError where there is none to be had, such as on a port that is in use."""
    family, _, _, _, address = socket.getaddrinfo(
        http.host, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    alone = http.api_processes == 1
    listening = bound(http, family, address, shared=False)
    try:
        # Listening could wait until the application is there, but a second server on the same port must fail now.
        listening.listen(BACKLOG)
        if alone:
            return listening
        # Sockets that share a port would share it with another server's, too: so this one had to be refused first.
        address = listening.getsockname()
        listening.close()
        listening = bound(http, family, address, shared=True)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def bound(http: HttpConfig, family: int, address: tuple[Any, ...], *, shared: bool) -> socket.socket:
    """A socket with an address, which does not listen yet. shared: with other API processes. Raises OSError."""
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            # The kernel divides new connections evenly among the sockets that listen.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Inherited by connections: the kernel ends one whose client has stopped reading, or vanished, for so long.
            timeout_ms = int(1000 * (http.stalled_client_timeout_s or 0))
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        listening.bind(address)
    except OSError:
        listening.close()
        raise
    return listening


def allow_connections(count: int | None) -> None:
    """Raise the limit on open files, often 1024, to what count connections and everything else take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if count is None else count + OTHER_FILES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        logger.warning("the system allows %d open files, too few for http.max_connections (%s)", hard, count)
        wanted = hard
    if soft != resource.RLIM_INFINITY and (wanted == resource.RLIM_INFINITY or wanted > soft):
        with contextlib.suppress(OSError, ValueError):  # macOS has a limit of its own below the one that it names
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _url(listening: socket.socket, *, secure: bool) -> str:
    host, port = listening.getsockname()[:2]
    return f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


class Terminal:
    """Start-up as a person sees it: steps with their seconds, then one line that says where to go.

    With the log in JSON both are lines of the log.
    """

    def __init__(self, model: str, url: str, log_format: LogFormat) -> None:
        self._model = model
        self._url = url
        self._json = log_format == "json"
        self._steps = StartSteps()
        self._again: asyncio.TimerHandle | None = None
        self._interactive = sys.stderr.isatty()
        self._open_line = False
        self._announced = False
        self.failure: str | None = None

    def show(self, status: EngineStatus) -> None:
        """Tell about a change of the server's status. Called in the event loop."""
        stage = self._steps.stage
        self._steps.note(status)
        if status.state != "loading" and self._again is not None:
            self._again.cancel()
            self._again = None
        match status.state:
            case "loading":
                if self._steps.stage != stage:
                    self._progress(is_new=True)
            case "ready":
                self._end_line()
                if status.ready is not None:
                    logger.info(
                        "engine ready: %s%s, %s, %s",
                        status.ready.device,
                        f" x {ranks}" if (ranks := status.ready.tensor_parallel_size) > 1 else "",
                        status.ready.dtype,
                        status.ready.kernels,
                    )
                if not self._announced:
                    self._announced = True
                    line = f"Serving {self._model} on {self._url} (requests name it as their model)"
                    if self._json:
                        logger.info(line)
                    else:
                        print(line, flush=True)
            case "failed":
                self._end_line()
                self.failure = status.message

    def _progress(self, is_new: bool = False) -> None:
        """Show the step, now and every few seconds until something else is to be shown."""
        if self._json:
            if is_new:
                logger.info("loading: %s", self._steps.stage)
            return
        if self._interactive:
            if is_new:
                self._end_line()
            # The cursor goes back, so that a log line, of the engine too, overwrites this one.
            sys.stderr.write(f"\x1b[K{self._steps}\r")
            sys.stderr.flush()
            self._open_line = True
        else:
            print(self._steps, file=sys.stderr, flush=True)
        if self._again is not None:
            self._again.cancel()
        pause_s = 1.0 if self._interactive else STEP_LINES_S
        self._again = asyncio.get_running_loop().call_later(pause_s, self._progress)

    def _end_line(self) -> None:
        if self._open_line:
            sys.stderr.write("\n")
            sys.stderr.flush()
            self._open_line = False


class Server(uvicorn.Server):
    """uvicorn's server with a drain of our own.

    On SIGTERM or SIGINT no new requests are taken; those under way may go on for the configured time, then they end
    with an error. The exit status stays 0, while uvicorn would end the process by the signal that it caught. SIGINT
    after either ends everything at once, with the exit status INTERRUPTED.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._aborting: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
            # Removing it restores the handler that raises KeyboardInterrupt.
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; SIGINT while draining ends at once."""
        if not self.should_exit:
            drain_s = self._service.config.http.drain_timeout_s
            logger.info("%s: shutting down; running requests have %.0f s", signal.Signals(sig).name, drain_s)
            self.drain()
        elif sig == signal.SIGINT:
            logger.info("SIGINT again: ending at once")
            if isinstance(self._service.engine, EngineClient):
                self._service.engine.kill()
            os._exit(INTERRUPTED)

    def drain(self) -> None:
        """Take nothing new, let running requests go on for the configured time, and end."""
        self._service.drain()
        self.should_exit = True
        asyncio.get_running_loop().call_later(self._service.config.http.drain_timeout_s, self._abort_running)

    def _abort_running(self) -> None:
        if self._service.engine is not None:
            self._aborting = asyncio.ensure_future(self._service.engine.stop())
