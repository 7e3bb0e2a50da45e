"""Types of the checkpoint package for the packages above it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[str, float], None]
"""Called with what is being done, in words, and how far it is (0 to 1)."""


class CheckpointError(Exception):
    """A checkpoint cannot be served; the message is one line that names the folder or file and the reason."""


def check_disk(folder: Path, needed: int, what: str) -> None:
    """Raise CheckpointError if the disk of folder, which need not exist, has fewer than needed bytes free for what."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise CheckpointError(
            f"{folder}: {what} takes {needed / 2**30:.1f} GiB on disk, {free / 2**30:.1f} GiB are free"
        )
