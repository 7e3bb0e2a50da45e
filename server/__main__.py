"""The command: python -m server."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; return the exit status."""
    # Until the server handles signals, Ctrl-C ends it without a traceback, in the middle of imports too.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from server.command_line import main as run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
