"""Imports of an engine's process, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

from server.config import Config
from server.engine.supervisor import child

_ENGINE = """
import sys
from server.engine.imports import import_engine
import_engine()
assert "server.engine.core" in sys.modules
assert "torch._inductor.compile_fx" not in sys.modules
import torch
assert torch.compile.__module__ == "torch"
"""


def test_an_engine_imports_no_compiler() -> None:
    """bitsandbytes has functions compiled as it is imported; torch.compile() is torch's own again afterwards."""
    subprocess.run([sys.executable, "-c", _ENGINE], check=True, timeout=280)


async def test_a_process_that_imports_ends_with_the_one_that_started_it() -> None:
    """As where the port is in use: the server ends while the engine's process, started first, still imports."""
    started = child.start_child(Config())
    started.close_input()
    assert await started.wait() == 1
