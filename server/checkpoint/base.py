"""What the checkpoint package promises to the packages above it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with what is being done, in words, and how far it is (0 to 1)."""


class CheckpointError(Exception):
    """A checkpoint cannot be served; the message is one line that names the folder or file and the reason."""
