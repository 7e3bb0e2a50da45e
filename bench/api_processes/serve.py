"""The server, with the stub in the engine's place: `python -m bench.api_processes.serve`, arguments as the server's."""

from __future__ import annotations

import asyncio
import sys

from server.config import Config
from server.engine.supervisor import process, standby


async def start_stub(config: Config, *, tells_imported: int | None = None) -> asyncio.subprocess.Process:
    """Do what process.start_child() does, with the stub; there is nothing to import for a standby process."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.api_processes.stub", stdin=asyncio.subprocess.PIPE, start_new_session=True
    )


if __name__ == "__main__":
    for module in (process, standby):
        vars(module)["start_child"] = start_stub
    from server.__main__ import main

    sys.exit(main())
