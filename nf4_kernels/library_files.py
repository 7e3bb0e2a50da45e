"""Places of the compiled libraries. A library that does not exist is compiled for this machine when it is first used.

They are looked for in the package's lib/ folder, where `python -m nf4_kernels.build` puts them if it may, and then in the
cache: $XDG_CACHE_HOME/nf4-kernels, by default ~/.cache/nf4-kernels. First use compiles into lib/ in a checkout, into the
cache in an installed package. Outside a checkout a folder's name is a digest of the sources, so that no library is used
with another version of the package than its own.

build.py is imported where it is called: `python -m nf4_kernels.build` imports this package before it runs that module.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nf4_kernels.object_files import BuildError

CPU, CUDA = "libnf4_cpu.so", "libnf4_cuda.so"


def cache_folder() -> Path:
    """The folder of this package in the user's cache; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "nf4-kernels"


def install_folder() -> Path:
    """Folder into which `python -m nf4_kernels.build` puts libraries: the package's if it is writable, else in the cache."""
    from nf4_kernels import build

    own = _own_folder()
    try:
        own.mkdir(parents=True, exist_ok=True)
        writable = os.access(own, os.W_OK)
    except OSError:
        writable = False
    return own if writable else cache_folder() / build.sources_digest()


def cpu_library() -> Path | str:
    """libnf4_cpu.so, compiled if need be; or why there is none and what to do about it."""
    from nf4_kernels import build

    return _find(CPU, "") or _compile(CPU, "", build.build_cpu)


def cuda_library() -> Path | str:
    """libnf4_cuda.so, compiled for this machine's GPUs if need be; or why there is none and what to do about it."""
    import torch  # here, as `python nf4_kernels/build.py` imports this module without it

    from nf4_kernels import build

    found = _find(CUDA, "")
    if found is not None:
        return found
    if not torch.cuda.is_available():
        return f"{CUDA} has not been built, and torch sees no CUDA GPU to build it for"
    archs = build.installed_gpu_archs() or build.CUDA_ARCHS
    found = _find(CUDA, archs)
    if found is not None:
        return found
    nvcc = build.find_nvcc()
    if nvcc is None:
        return (
            f"{CUDA} has not been built and there is no nvcc: set CUDA_HOME, or pip install 'nf4-kernels[build-cuda]'"
        )
    return _compile(CUDA, archs, partial(build.build_cuda, nvcc, archs=archs))


def _own_folder() -> Path:
    from nf4_kernels import build

    return build.LIBRARIES if build.IS_CHECKOUT else build.LIBRARIES / build.sources_digest()


def _cached(archs: str) -> Path:
    from nf4_kernels import build

    name = "-".join([build.sources_digest(), *archs.split(";")] if archs else [build.sources_digest()])
    return cache_folder() / name


def _find(name: str, archs: str) -> Path | None:
    own, cached = _own_folder() / name, _cached(archs) / name
    if own.exists():
        return own
    if not cached.exists():
        return None
    reason = untrusted(cached)
    if reason is not None:
        print(f"nf4_kernels: {reason}", file=sys.stderr, flush=True)
    return cached if reason is None else None


def untrusted(path: Path) -> str | None:
    """Why code in a cache folder is not loaded; None if nobody but this user and root can have written it.

    A group may write to it if this process belongs to that group, as in volumes of containers. OSError if it is not there.
    """
    if not hasattr(os, "geteuid"):
        return None
    stored, folder = path.stat(), path.parent.stat()
    if stored.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to user {stored.st_uid}, so it is not loaded"
    if stored.st_mode & stat.S_IWOTH or (folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX):
        return f"every user may write to {path}, so it is not loaded"
    if stored.st_mode & stat.S_IWGRP and stored.st_gid not in (os.getegid(), *os.getgroups()):
        return f"group {stored.st_gid} may write to {path}, so it is not loaded"
    return None


def _compile(name: str, archs: str, compile_into: Callable[..., Path]) -> Path | str:
    from nf4_kernels import build

    folder = install_folder() if build.IS_CHECKOUT else _cached(archs)
    say = partial(print, file=sys.stderr, flush=True)
    say(f"nf4_kernels: compiling {name} for this machine, once, into {folder} ...")
    began = time.monotonic()
    try:
        path = compile_into(folder=folder, report=say)
    except BuildError as e:
        return f"{name} could not be compiled: {e}"
    except OSError as e:
        return f"{name} could not be written ({e}): set XDG_CACHE_HOME to a folder that can be written to"
    say(f"nf4_kernels: compiled {name} in {time.monotonic() - began:.0f} s")
    return path
