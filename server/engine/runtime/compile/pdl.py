"""Programmatic dependent launch: on Hopper and later a kernel may start before the one in front of it has ended.

Such a kernel waits itself for what the kernels in front of it write. Each kernel of our CUDA graphs lets the next one
start at once and then waits before it touches anything that a kernel writes, so that only waiting kernels start early.
Their start, and the weights that NF4 GEMMs read before they wait, are hidden behind the kernels in front.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Compiled code is cached on disk by what is compiled. The tag keeps code with our waits apart from inductor's own.
_CACHE_TAG = "launch and wait first"


@contextmanager
def dependent_launches() -> Iterator[None]:
    """While entered, inductor compiles kernels that start early where the GPU can, and that wait before they read.

    Left to itself inductor lets the next kernel start once the last value has been read; a small kernel is all but over
    then, and the next GEMM's start comes on top. Where this torch lacks the method that places the waits, kernels start
    after the one in front has ended, which is slower and safe: inductor's own placement is not (see below).
    """
    # Takes a second to import, and only CUDA needs it.
    from torch._inductor.codegen import triton

    kernels: Any = triton.TritonKernel
    config: Any = torch.compiler.config
    filter_pdl = getattr(kernels, "_filter_pdl", None)
    if filter_pdl is None:
        _warn_without_pdl()
        with torch._inductor.config.patch({"triton.enable_pdl": False}):
            yield
        return
    with (
        torch._inductor.config.patch({"triton.enable_pdl": True}),
        config.patch(cache_key_tag=f"{config.cache_key_tag}{_CACHE_TAG}"),
    ):
        kernels._filter_pdl = _launch_and_wait_first
        try:
            yield
        finally:
            kernels._filter_pdl = filter_pdl


@functools.cache
def _warn_without_pdl() -> None:
    logger.warning(
        "compiled kernels run without programmatic dependent launch, more slowly:"
        " torch %s places their waits in a way that this server does not know",
        torch.__version__,
    )


def _launch_and_wait_first(kernel: Any, code: Any) -> None:
    """Takes the place of TritonKernel._filter_pdl, which removes all waits of a kernel's body but the first.

    The next kernel may start before this one has waited. That is safe because every kernel of a graph waits before its
    first access to what another one writes, so that none ends before all kernels in front of it have ended. Inductor's
    own placement breaks this: it waits only before it reads what the kernel directly in front writes.
    """
    if not kernel._enable_pdl_codegen():
        return
    wait, launch = kernel.GDC_WAIT, kernel.GDC_LAUNCH
    kept = [line for line in code._lines if not (isinstance(line, str) and (wait in line or launch in line))]
    indent = next((line[: len(line) - len(line.lstrip())] for line in kept if isinstance(line, str)), "")
    code._lines = [indent + launch, indent + wait, *kept]
