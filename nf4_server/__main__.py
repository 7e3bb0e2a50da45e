"""The command nf4-server, and python -m nf4_server."""

from __future__ import annotations

import sys

from server.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
