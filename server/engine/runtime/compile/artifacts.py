"""Compiled layers kept in the user's cache folder, so that a later start needs neither a trace nor a compiler.

What is read back is executed, so it is read only if nobody but the user and root can have written it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nf4_kernels.cuda import load_error
from nf4_kernels.library_files import untrusted
from server.config import default_cache_dir
from server.engine.runtime.native import cpu_features
from server.engine.runtime.sources import code_digest

logger = logging.getLogger(__name__)

KEPT_UNUSED_S = 60 * 86400
"""How long a kept function stays that no start reads."""


def artifact_path(device: torch.device, *kind: object) -> Path:
    """Where the compiled function of one kind of layer is kept; everything that its code depends on is in the name."""
    packages = [_version(name) for name in ("torch", "triton", "transformers", "bitsandbytes")]
    settings = (platform.python_version(), _machine(device), _compiler_settings(), torch.get_float32_matmul_precision())
    digest = hashlib.sha256(repr((packages, code_digest(), settings, kind)).encode()).hexdigest()
    return default_cache_dir() / "compiled" / "layers" / f"{digest[:32]}.bin"


@functools.cache
def _version(package: str) -> str | None:
    """The version of a package; None where it is not installed, as Triton is not on a CPU."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine(device: torch.device) -> tuple[object, ...]:
    """What code for a device depends on."""
    if device.type == "cpu":
        return torch.get_num_threads(), cpu_features()
    # Code has its device's number in it.
    return str(device), torch.cuda.get_device_name(device), torch.version.cuda, load_error()


def _compiler_settings() -> list[tuple[str, str]]:
    """The user's own settings of torch's and Triton's compilers, but for the folders that they write to."""
    names = (name for name in os.environ if name.startswith(("TORCHINDUCTOR_", "TORCHDYNAMO_", "TRITON_")))
    return sorted((name, os.environ[name]) for name in names if not name.endswith("_DIR"))


def load_artifact(path: Path, layer: nn.Module) -> Callable[..., Any] | None:
    """The function kept at path for a layer like the one it was compiled from; None where there is none that works."""
    try:
        reason, data = untrusted(path), path.read_bytes()
    except OSError:
        return None
    if reason is not None:
        logger.warning("%s; layers are compiled again", reason)
        return None
    with contextlib.suppress(OSError):  # the folder may be another user's
        os.utime(path)
    try:
        from torch._dynamo.aot_compile import AOTCompiledFunction

        # torch would probe the CPU's vector instructions for two seconds, in processes of its own. The probes succeeded
        # when this was stored.
        with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
            ahead: Any = AOTCompiledFunction.deserialize(data, None, {"layer": layer})
    except Exception as e:  # another torch's, or its compiled libraries have been removed
        logger.info("a kept compiled layer cannot be used: %s: %s", type(e).__name__, e)
        return None
    function: Callable[..., Any] = ahead.fn
    return function


def store_artifact(path: Path, ahead: Any, layer: nn.Module, device: torch.device) -> None:
    """Keep what torch.compile(...).aot_compile() has returned. A layer that cannot be kept is compiled at every start."""
    try:
        if device.type == "cpu" and not _probes_succeed():
            return
        data = type(ahead).serialize(ahead, {"layer": layer}).serialized_data
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            made = Path(work) / path.name
            made.write_bytes(data)
            made.replace(path)
        _remove_unused(path.parent)
    except Exception as e:
        logger.info("compiled layers are not kept: %s: %s", type(e).__name__, e)


def _remove_unused(folder: Path) -> None:
    """Remove what no start has read for long: other versions' and other models' functions."""
    oldest = time.time() - KEPT_UNUSED_S
    for path in folder.glob("*.bin"):
        with contextlib.suppress(FileNotFoundError):  # another process was here
            if path.stat().st_mtime < oldest:
                path.unlink()


def _probes_succeed() -> bool:
    """Whether torch may use every vector instruction set that this CPU reports."""
    from torch._inductor import cpu_vec_isa

    usable = cpu_vec_isa.valid_vec_isa_list()
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        return usable == cpu_vec_isa.valid_vec_isa_list.__wrapped__()
