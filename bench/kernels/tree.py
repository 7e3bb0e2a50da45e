"""The yardstick of dequantization: bench/csrc/tree.cu, compiled with nvcc for this machine's GPU when it is first used."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from nf4_kernels import Weight
from nf4_kernels.build import find_nvcc
from nf4_kernels.library_files import cache_folder

SOURCE = Path(__file__).parents[1] / "csrc" / "tree.cu"


class Tree:
    """The compiled yardstick. RuntimeError where it cannot be compiled."""

    def __init__(self) -> None:
        loaded = ctypes.CDLL(str(_compiled()))
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._run = loaded.nf4_bench_dequantize_tree
        self._run.argtypes = (pointer, pointer, integer, integer, pointer, pointer)

    def dequantize(self, weight: Weight) -> Tensor:
        """A plain weight with an even number of elements, in blocks of a power of two, as bfloat16 of its shape."""
        if weight.absmax_8bit is not None:
            raise ValueError("the tree takes plain scales only")
        out = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.packed.device)
        stream = torch.cuda.current_stream(out.device).cuda_stream
        pointers = weight.packed.data_ptr(), weight.absmax.data_ptr()
        status = self._run(*pointers, weight.blocksize, out.numel(), out.data_ptr(), stream)
        if status:
            raise RuntimeError(f"tree: CUDA error {status}")
        return out


def _compiled() -> Path:
    """The shared library; compiled where it is not in the cache yet."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("bench/csrc/tree.cu needs nvcc: set CUDA_HOME, or pip install 'nf4-kernels[build-cuda]'")
    major, minor = torch.cuda.get_device_capability()
    command = [nvcc, "-O3", "-std=c++17", "-Xcompiler", "-fPIC", f"-arch=sm_{major}{minor}", "-shared"]
    wheel = Path(nvcc).resolve().parent.parent / "lib"
    command += [f"-L{wheel}"] if (wheel / "libcudart_static.a").exists() else []
    digest = hashlib.sha256(repr(command).encode() + SOURCE.read_bytes()).hexdigest()[:16]
    target = cache_folder() / f"bench-tree-{digest}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".partial")
        done = subprocess.run(
            [*command, str(SOURCE), "-o", str(unfinished)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(done.args)}\n{done.stdout}{done.stderr}".rstrip())
        unfinished.replace(target)
    return target
