"""Runs code in Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys


def run_interpreted(code: str) -> None:
    """Run code in a new process, where Triton interprets its kernels. Raises AssertionError with its output if it fails."""
    # Triton reads the variable when it is imported.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
