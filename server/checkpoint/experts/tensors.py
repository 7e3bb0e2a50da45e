"""Reads single tensors of a checkpoint and joins experts' NF4 weights. Every error names the tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import quantize_4bit
from safetensors import SafetensorError, safe_open

from nf4_kernels import Weight
from nf4_kernels.format import NESTED_BLOCKSIZE, block_scales
from server.checkpoint.base import CheckpointError
from server.checkpoint.experts.names import FP4_STATE, NF4_STATE
from server.checkpoint.names import is_ignored
from server.checkpoint.packed import read_packed

BLOCKSIZE = 64
"""Weights under one scale where 16-bit weights are quantized here."""
_STATE_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", NF4_STATE)


class CheckpointTensors:
    """The tensors of a checkpoint by name, whatever file they are in."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        self.folder = folder
        self._open: list[Any] = []
        for file in files:
            try:
                self._open.append(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as e:
                raise CheckpointError(f"{file}: damaged: {' '.join(str(e).split())}") from e
        names = ((name, file) for file in self._open for name in file.keys())  # noqa: SIM118 - it is no dict
        self._file_of = {name: file for name, file in names if not is_ignored(name)}

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._file_of)

    def error(self, name: str, what: str) -> CheckpointError:
        """A CheckpointError that says what is wrong with a tensor."""
        return CheckpointError(f"{self.folder}: damaged: {name} {what}")

    def read(self, name: str) -> torch.Tensor:
        """A tensor, on the CPU."""
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder}: damaged: missing keys: {name}")
        try:
            tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        except (SafetensorError, OSError, ValueError) as e:
            raise self.error(name, f"cannot be read: {' '.join(str(e).split())}") from e
        return tensor

    def read_float(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor of floating-point numbers and of that shape."""
        if name + FP4_STATE in self:
            raise CheckpointError(f"{self.folder}: {name}: experts and routers in FP4 are not served; save them in NF4")
        tensor = self.read(name)
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise self.error(name, f"is {tensor.dtype} {list(tensor.shape)}, it must be floats {list(shape)}")
        return tensor

    def shape(self, name: str) -> list[int]:
        """A tensor's shape."""
        shape: list[int] = self._file_of[name].get_slice(name).get_shape()
        return shape

    def read_part(self, name: str, index: int, shape: tuple[int, ...]) -> torch.Tensor:
        """tensor[index] of a tensor of that shape; the rest of it is not read."""
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder}: damaged: missing keys: {name}")
        part = self._file_of[name].get_slice(name)
        if tuple(part.get_shape()) != shape:
            raise self.error(name, f"is {list(part.get_shape())}, it must be {list(shape)}")
        tensor: torch.Tensor = part[index]
        if not tensor.is_floating_point():
            raise self.error(name, f"is {tensor.dtype}, it must be floats")
        return tensor

    def read_nf4(self, name: str, shape: tuple[int, ...]) -> Weight:
        """A weight that bitsandbytes has saved in NF4, on the CPU."""
        parts = {part.lstrip("."): self.read(name + part) for part in _STATE_PARTS if name + part in self}
        try:
            weight = read_packed(name, {"weight": self.read(name), **parts})
        except CheckpointError as e:
            raise CheckpointError(f"{self.folder}: {str(e).removeprefix(f'{self.folder}: ')}") from e
        if weight.shape != shape or weight.table != "nf4":
            raise self.error(name, f"is {weight.table} of {list(weight.shape)}, it must be nf4 of {list(shape)}")
        return weight


def quantize(matrix: torch.Tensor) -> Weight:
    """A matrix in NF4, blocks of 64, with double quantization where it has whole groups of 256 blocks."""
    nested = matrix.numel() % (BLOCKSIZE * NESTED_BLOCKSIZE) == 0
    packed, state = quantize_4bit(
        matrix.contiguous(), blocksize=BLOCKSIZE, quant_type="nf4", compress_statistics=nested
    )
    return Weight.from_quant_state(packed, state)


def plain(weight: Weight) -> Weight:
    """The weight with every scale as float32."""
    if weight.absmax_8bit is None:
        return weight
    blocks = math.prod(weight.shape) // weight.blocksize
    return Weight(weight.packed, weight.shape, block_scales(weight)[:blocks], weight.blocksize)


def with_rows(weight: Weight, rows: torch.Tensor) -> Weight:
    """The rows of a weight [n, k] in another order; k is a multiple of the blocksize. Its scales become plain."""
    n, k = weight.matrix
    packed = weight.packed.view(n, k // 2)[rows].reshape(-1)
    absmax = plain(weight).absmax.view(n, k // weight.blocksize)[rows].reshape(-1)
    return Weight(packed, weight.shape, absmax, weight.blocksize)


def stack(weights: Sequence[Weight], shape: tuple[int, int, int], device: torch.device, expert_size: int) -> Weight:
    """The weight [experts, n, k] that these are one after another, each of whole scale blocks.

    Scales stay nested where every expert (of expert_size weights) and every given weight has whole groups of 256 blocks
    and all have one code table; else they become plain.
    """
    first = weights[0]
    sizes = [expert_size, *(math.prod(weight.shape) for weight in weights)]
    nested = all(size % (first.blocksize * NESTED_BLOCKSIZE) == 0 for size in sizes) and all(
        weight.absmax_code is not None
        and first.absmax_code is not None
        and torch.equal(weight.absmax_code, first.absmax_code)
        for weight in weights
    )
    if not nested:
        weights = [plain(weight) for weight in weights]
    packed = _joined([weight.packed for weight in weights], device)
    absmax = _joined([weight.absmax for weight in weights], device)
    if not nested or first.absmax_code is None:
        return Weight(packed, shape, absmax, first.blocksize)
    codes = _joined([weight.absmax_8bit for weight in weights], device)
    offsets = [
        weight.absmax_offset.reshape(-1).expand(weight.absmax.numel())
        for weight in weights
        if weight.absmax_offset is not None
    ]
    return Weight(
        packed, shape, absmax, first.blocksize, codes, first.absmax_code.to(device), _joined(offsets, device).float()
    )


def _joined(tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """All tensors joined into one on device; those on the host are joined there first."""
    flat = [tensor.reshape(-1) for tensor in tensors if tensor is not None]
    if len({tensor.device for tensor in flat}) > 1:
        flat = [tensor.to(device) for tensor in flat]
    return torch.cat(flat).to(device)
