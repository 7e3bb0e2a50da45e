"""Fetch and convert the embedded model: python -m server.checkpoint."""

from __future__ import annotations

import sys

from server.checkpoint.base import CheckpointError
from server.checkpoint.source import resolve_checkpoint
from server.config import EMBEDDED_MODEL, default_cache_dir


def main() -> int:
    """Make the embedded model and print its folder; returns the exit status."""
    try:
        folder = resolve_checkpoint(EMBEDDED_MODEL, default_cache_dir(), lambda stage, _: print(stage, file=sys.stderr))
    except CheckpointError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
