"""Latent attention's matrices on CPU as they are stored: in 4 bits. In float32 they would be read eight times as long."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from nf4_kernels import cpu
from nf4_kernels.format import TABLES, Weight, block_scales
from server.engine.runtime.attention.latent import DenseHeads, HeadSizes, LatentHeads, Project
from server.engine.runtime.native import load_native

SOURCE = Path(__file__).with_name("packed_heads.cpp")
_MAX_RANK = 4096
_MAX_TOKENS = 16
"""More tokens multiply by a dequantized copy, which is made for the call."""


class _Call(ctypes.Structure):
    """PackedHeads of packed_heads.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "table")),
        *((name, ctypes.c_int64) for name in ("heads", "plain", "width", "rank", "blocksize")),
    )


class PackedHeads(LatentHeads):
    """Matrices in NF4 or FP4, for float32 on CPU."""

    def __init__(self, weight: Weight, sizes: HeadSizes, project: Project) -> None:
        """weight: as of DenseHeads.of(). Raises ValueError, which says why it cannot be read."""
        super().__init__(sizes, project)
        library = load_native(SOURCE)
        if isinstance(library, str):
            raise ValueError(library)
        if sizes.rank % weight.blocksize or sizes.rank > _MAX_RANK:
            raise ValueError(f"rows of {sizes.rank} are no whole scale blocks of {weight.blocksize}, or too long")
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._absorb, self._values = library.absorb_queries, library.values_of_sums
        self._absorb.argtypes = (pointer, pointer, number, number, pointer, number, number, number)
        self._values.argtypes = (pointer, pointer, pointer, number)
        self._absorb.restype = self._values.restype = None
        self._weight = weight
        self._kept = weight.packed, block_scales(weight).contiguous(), torch.tensor(TABLES[weight.table])
        places = [tensor.data_ptr() for tensor in self._kept]
        self._call = _Call(*places, sizes.heads, sizes.plain, sizes.width, sizes.rank, weight.blocksize)
        self._address = ctypes.addressof(self._call)

    def absorbed(self, query: torch.Tensor) -> torch.Tensor:
        tokens, sizes = query.shape[0], self.sizes
        if tokens > _MAX_TOKENS or query.dtype is not torch.float32 or query.stride(2) != 1:
            return self._dense(query.dtype).absorbed(query)
        out = query.new_empty(tokens, sizes.heads, sizes.rank + query.shape[2] - sizes.plain)
        out[..., sizes.rank :] = query[..., sizes.plain :]
        given, found = (query.data_ptr(), *query.stride()[:2]), (out.data_ptr(), *out.stride()[:2])
        self._absorb(self._address, *given, *found, tokens)
        return out

    def values_of(self, sums: torch.Tensor) -> torch.Tensor:
        tokens, sizes = sums.shape[0], self.sizes
        if tokens > _MAX_TOKENS or sums.dtype is not torch.float32:
            return self._dense(sums.dtype).values_of(sums)
        out = sums.new_empty(tokens, sizes.heads, sizes.width)
        given = sums.contiguous()
        self._values(self._address, given.data_ptr(), out.data_ptr(), tokens)
        return out

    def _dense(self, dtype: torch.dtype) -> DenseHeads:
        return DenseHeads.of(cpu.dequantize(self._weight, dtype), self.sizes, self.project)
