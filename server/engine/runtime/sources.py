"""A digest of the code that decides what compiled code computes: kept artifacts of other code are not used."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import nf4_kernels
from server.checkpoint import experts

RUNTIME = Path(__file__).resolve().parent
"""The folder of server.engine.runtime."""
KERNELS = Path(nf4_kernels.__file__).resolve().parent
"""The folder of nf4_kernels."""
EXPERTS = Path(experts.__file__).resolve().parent
"""The folder of server.checkpoint.experts, whose modules are in models."""
# The kernels decide what compiled code may fuse.
_SOURCES = (".py", ".cpp", ".cu", ".cuh", ".h")


def code_digest() -> bytes:
    """SHA-256 of the names and contents of all source files below RUNTIME, KERNELS and EXPERTS, read once per process."""
    return _digest(RUNTIME, KERNELS, EXPERTS)


@functools.cache
def _digest(*roots: Path) -> bytes:
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(path for path in root.rglob("*") if path.suffix in _SOURCES):
            data = path.read_bytes()
            # Lengths keep one file's end apart from the next one's beginning.
            digest.update(repr((path.relative_to(root).as_posix(), len(data))).encode() + data)
    return digest.digest()
