"""The server, with the stub in the engine's place: `python -m bench.api_processes.serve`, arguments as the server's."""

from __future__ import annotations

import subprocess
import sys

from server.config import Config
from server.engine.supervisor import child


def start_stub(config: Config, *, tells_imported: int | None = None) -> child.Child:
    """Do what child.start_child() does, with the stub; there is nothing to import for a standby process."""
    command = [sys.executable, "-m", "bench.api_processes.stub"]
    return child.Child(subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True))


if __name__ == "__main__":
    vars(child)["start_child"] = start_stub
    from server.__main__ import main

    sys.exit(main())
