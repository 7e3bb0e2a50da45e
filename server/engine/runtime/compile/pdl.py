"""Launches that overlap: on Hopper and later a kernel may start before the one in front of it has ended.

What a kernel needs of the ones before it, it waits for itself. Each of a CUDA graph's kernels lets the next one start at
once and then waits before it touches anything that a kernel writes, so that only waiting kernels start early: their
start, and the weights that NF4 products read before they wait, are hidden behind the kernels before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Compiled code is cached on disk by what is compiled; how its launches overlap goes into the name.
_CACHE_TAG = "launch and wait first"


@contextmanager
def overlapping_launches() -> Iterator[None]:
    """Inductor's kernels compiled while this is entered start early where the GPU can, and wait before they read.

    Left to itself inductor lets the next kernel start once the last value has been read; a small kernel is all but over
    then, and the next product's start comes on top.
    """
    # Takes a second to import, and only CUDA needs it.
    from torch._inductor.codegen import triton

    kernels: Any = triton.TritonKernel
    config: Any = torch.compiler.config
    filter_pdl = getattr(kernels, "_filter_pdl", None)
    with (
        torch._inductor.config.patch({"triton.enable_pdl": True}),
        config.patch(cache_key_tag=f"{config.cache_key_tag}{_CACHE_TAG}"),
    ):
        if filter_pdl is not None:
            kernels._filter_pdl = _launch_and_wait_first
        try:
            yield
        finally:
            if filter_pdl is not None:
                kernels._filter_pdl = filter_pdl


def _launch_and_wait_first(kernel: Any, code: Any) -> None:
    """Takes the place of TritonKernel._filter_pdl, which removes all waits of a kernel's body but the first.

    The next kernel may start before this one has waited: that is safe as every kernel of a graph waits before its first
    access to what another one writes, so that none ends before all kernels in front of it have ended. (Inductor's own
    kernels read what is older than the kernel before without waiting; these do not.)
    """
    if not kernel._enable_pdl_codegen():
        return
    wait, launch = kernel.GDC_WAIT, kernel.GDC_LAUNCH
    kept = [line for line in code._lines if not (isinstance(line, str) and (wait in line or launch in line))]
    indent = next((line[: len(line) - len(line.lstrip())] for line in kept if isinstance(line, str)), "")
    code._lines = [indent + launch, indent + wait, *kept]
