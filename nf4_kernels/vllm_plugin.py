"""vLLM's plugin (group vllm.general_plugins): bitsandbytes layers of vLLM run on these kernels.

vLLM calls its plugins in every process, and may fork workers from processes that have called them. Importing bitsandbytes
initializes CUDA, which no process may do before it forks. So the plugin waits until vLLM itself imports bitsandbytes: that
is in a worker that makes a model of its layers. Other models pay nothing.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from nf4_kernels import __version__, cpu, cuda, enable

SWITCH = "NF4_KERNELS_VLLM"
"""Environment variable; 0 leaves vLLM as it is."""
_PACKAGE = "bitsandbytes"

# Below vLLM's own logger, whose handler and format it gets.
logger = logging.getLogger("vllm.nf4_kernels")


def register() -> None:
    """Arrange that enable() runs when bitsandbytes is imported, at once if it has been. Calling it again changes nothing.

    An error is logged in one line, and bitsandbytes' own kernels run.
    """
    if os.environ.get(SWITCH) == "0":
        logger.info("nf4_kernels is off: %s is 0", SWITCH)
    elif _PACKAGE in sys.modules:
        _enable()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _enable() -> None:
    try:
        kernels = cuda if torch.cuda.is_available() else cpu
        if (error := kernels.load_error()) is not None:
            raise RuntimeError(error)
        enable()
    except Exception as e:  # vLLM must start, whatever is wrong here
        logger.warning("nf4_kernels is off, bitsandbytes' own kernels run: %s", e)
        return
    device = torch.cuda.get_device_name() if kernels is cuda else cpu.isa()
    logger.info("NF4 layers run on nf4_kernels %s (%s); %s=0 switches it off", __version__, device, SWITCH)


class _Finder(MetaPathFinder):
    """Finds bitsandbytes as the other finders do, with a loader that calls _enable()."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PACKAGE:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for f in others if (spec := f.find_spec(fullname, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(self, spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, finder: _Finder, loader: Loader) -> None:
        self._finder, self._loader = finder, loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _enable()
