"""The runtime's own C++, compiled on first use for the machine it runs on and kept in the user's cache folder."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from pathlib import Path

from nf4_kernels.library_files import untrusted
from server.config import default_cache_dir

logger = logging.getLogger(__name__)

FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math", "-fvisibility=default"),
)


@functools.cache
def load_native(source: Path) -> ctypes.CDLL | str:
    """The compiled library of one source file and the headers beside it, or why there is none, in one line.

    Compiled with $CXX or g++; takes a few seconds once per source, compiler and kind of CPU. torch must have been
    imported before, so that its OpenMP threads are the library's, too.
    """
    compiler = os.environ.get("CXX", "g++")
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
        text = b"".join(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))
        key = text + version + repr((FLAGS, cpu_features())).encode()
        library = default_cache_dir() / "native" / f"{source.stem}-{hashlib.sha256(key).hexdigest()[:16]}.so"
        reason = untrusted(library) if library.exists() else None
        if reason is not None:
            logger.warning("%s; it is compiled again", reason)
        if reason is not None or not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=library.parent) as work:
                made = Path(work) / library.name
                subprocess.run([compiler, *FLAGS, str(source), "-o", str(made)], capture_output=True, check=True)
                made.replace(library)
        return ctypes.CDLL(str(library))
    except subprocess.CalledProcessError as e:
        lines = e.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {e.returncode}"]
        return f"{source.name} does not compile: {lines[0]}"
    except OSError as e:
        return f"{source.name} cannot be compiled or loaded: {e}"


def cpu_features() -> str:
    """Features that -march=native depends on, as text."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in text.splitlines() if line.startswith(wanted)))
