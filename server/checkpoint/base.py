"""What the checkpoint room promises to the rooms above it."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint cannot be served; the message is one line that names the folder or file and the reason."""
