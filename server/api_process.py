"""An API process beside the first one (http.api_processes): `python -m server.api_process FD`, started by it.

FD is one of a pair of sockets, over which the first process sends everything, beginning with the configuration.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from server.api_processes.link import Setup, read_setup
from server.api_processes.place import Place
from server.command_line import keep_torch_out
from server.config import Config
from server.logs import set_up_logging
from server.objects import lasting_objects
from server.observability.value_files import keep_values_in

if TYPE_CHECKING:
    from server.engine.supervisor.base import EngineStatus


def main() -> int:
    """Serve until the first process says that it ends, or has ended."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the first process lets this one end in order
    end = socket.socket(fileno=int(sys.argv[1]))
    try:
        setup = read_setup(end)
    except EOFError:
        return 1
    config = Config.model_validate(setup.config)
    set_up_logging(config.log_level, config.log_format)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"nf4-api-{setup.row}")
    keep_torch_out()
    keep_values_in(Place(Path(setup.folder)).metrics)
    return _serve(config, setup, end)


def _serve(config: Config, setup: Setup, end: socket.socket) -> int:
    # Imported here: the metrics' values are in files from their import on.
    with lasting_objects():
        import uvicorn

        from server.api.answering.service import Service
        from server.api_processes.member import Member
        from server.app import create_app
        from server.serving import Server, allow_connections, bound, uvicorn_config

    class MemberServer(Server):
        """Drains when the first process says so, and tells it when connections are taken."""

        def __init__(self, config: uvicorn.Config, service: Service, member: Member) -> None:
            super().__init__(config, service)
            self._member = member

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Leave signals to the first process; a service manager sends them to all."""
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self._member.listening()

        def drain(self) -> None:
            if not self.started:
                os._exit(0)
            super().drain()

    def on_status(status: EngineStatus) -> None:
        # The first process has said why an engine fails; this one can fail by itself only before it listens.
        if status.state == "failed" and not server.started:
            os._exit(1)

    def drain() -> None:
        server.drain()

    member = Member(config, setup, end, drain)
    app = create_app(config, on_status, member)
    allow_connections(config.http.max_connections)
    server = MemberServer(uvicorn_config(config.http, app), app.state.service, member)
    # It listens once its model is there: until then connections go to others.
    server.run(sockets=[bound(config.http, setup.family, setup.address, shared=True)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
