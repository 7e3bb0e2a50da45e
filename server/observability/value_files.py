"""Folder of prometheus_client's values in its multiprocess mode: chosen before it is imported."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def keep_values_in(folder: Path) -> None:
    """Let the values of this process' metrics be files in a folder, whatever the variable says so far."""
    os.environ[VARIABLE] = str(folder)
