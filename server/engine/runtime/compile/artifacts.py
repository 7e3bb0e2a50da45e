"""Compiled layers kept in the user's cache folder, so that a later start needs neither a trace nor a compiler.

What is read back is executed, so the folder belongs to the user alone, like the compiled libraries beside it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from server.config import default_cache_dir
from server.engine.runtime.native import cpu_features
from server.engine.runtime.sources import code_digest

logger = logging.getLogger(__name__)


def artifact_path(*kind: object) -> Path:
    """Where the compiled function of one kind of layer is kept; everything that its code depends on is in the name."""
    packages = [version(name) for name in ("torch", "transformers")]
    settings = (platform.python_version(), torch.get_num_threads(), cpu_features())
    digest = hashlib.sha256(repr((packages, code_digest(), settings, kind)).encode()).hexdigest()
    return default_cache_dir() / "compiled" / "layers" / f"{digest[:32]}.bin"


def load_artifact(path: Path, layer: nn.Module) -> Callable[..., Any] | None:
    """The function kept at path for a layer like the one it was compiled from; None where there is none that works."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    try:
        from torch._dynamo.aot_compile import AOTCompiledFunction

        # torch would probe the CPU's vector instructions for two seconds, in processes of its own. The probes succeeded
        # when this was stored.
        with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
            ahead: Any = AOTCompiledFunction.deserialize(data, None, {"layer": layer})
    except Exception as e:  # another torch's, or its compiled libraries have been removed
        logger.info("a kept compiled layer cannot be used: %s: %s", type(e).__name__, e)
        return None
    ahead.disable_guard_check()
    function: Callable[..., Any] = ahead.fn
    return function


def store_artifact(path: Path, ahead: Any, layer: nn.Module) -> None:
    """Keep what torch.compile(...).aot_compile() has returned. A layer that cannot be kept is compiled at every start."""
    try:
        if not _probes_succeed():
            return
        data = type(ahead).serialize(ahead, {"layer": layer}).serialized_data
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
    except Exception as e:
        logger.info("compiled layers are not kept: %s: %s", type(e).__name__, e)


def _probes_succeed() -> bool:
    """Whether torch may use every vector instruction set that this CPU reports."""
    from torch._inductor import cpu_vec_isa

    usable = cpu_vec_isa.valid_vec_isa_list()
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        return usable == cpu_vec_isa.valid_vec_isa_list.__wrapped__()
