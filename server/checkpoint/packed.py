"""Tensors that bitsandbytes has packed to 4 bits: whether they are whole and fit, and their values in 16 bit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from bitsandbytes.functional import get_4bit_type
from torch import Tensor

from nf4_kernels import cpu
from nf4_kernels.format import unpack
from server.checkpoint.base import CheckpointError

# How many values are expanded at once: their codes take half a gigabyte while they are looked up.
_EXPANDED_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class PackedState:
    """Companions of a packed tensor's codes, checked."""

    table: str
    """nf4 or fp4."""
    values: Tensor
    """float32 [16]: what each code stands for."""
    shape: tuple[int, ...]
    blocksize: int
    absmax: Tensor
    """A scale for each block in float32, or uint8 indices into nested_values."""
    nested_values: Tensor | None = None
    nested_absmax: Tensor | None = None
    nested_blocksize: int = 0
    nested_offset: float = 0.0

    def scales(self) -> Tensor:
        """float32 [blocks]: every block's scale."""
        if self.nested_values is None or self.nested_absmax is None:
            return self.absmax.reshape(-1).float()
        found = self.nested_values.float().reshape(-1)[self.absmax.reshape(-1).long()]
        groups = self.nested_absmax.float().reshape(-1).repeat_interleave(self.nested_blocksize)
        return found * groups[: found.numel()] + self.nested_offset


def keeps_fp4(device: torch.device) -> bool:
    """Whether FP4 stays packed on a device: the CPU kernels have its table. Elsewhere it is expanded while loading."""
    return device.type == "cpu" and cpu.load_error() is None


def read_state(name: str, tensors: Mapping[str, Tensor]) -> PackedState:
    """The state of the packed tensor of that name, from its companions in the files by their last names.

    Raises CheckpointError, which names the tensor, for companions that are missing, too short or not finite, or whose table
    is not the one that they name.
    """
    fields, companions = _fields(name, tensors)
    try:
        table, blocksize = str(fields["quant_type"]), int(fields["blocksize"])
        shape = tuple(int(size) for size in fields["shape"])
        nested = "nested_absmax" in companions
        state = PackedState(
            table, companions["quant_map"].float().reshape(-1), shape, blocksize, companions["absmax"],
            *((companions["nested_quant_map"], companions["nested_absmax"], int(fields["nested_blocksize"]),
               float(fields["nested_offset"])) if nested else ()),
        )  # fmt: skip
    except KeyError as e:
        raise CheckpointError(f"damaged: {name} is packed to 4 bits and has no {e.args[0]}") from e
    except (OverflowError, TypeError, ValueError) as e:
        raise CheckpointError(f"damaged: the quant_state of {name} is not bitsandbytes': {e}") from e
    _check_sizes(name, tensors["weight"], state)
    _check_values(name, state)
    return state


def expand(packed: Tensor, state: PackedState, dtype: torch.dtype) -> Tensor:
    """The packed tensor's values in dtype: float32 table entry times float32 scale, then one rounding."""
    count = math.prod(state.shape)
    data, scales = packed.reshape(-1).view(torch.uint8), state.scales()
    out = torch.empty(count, dtype=dtype, device=packed.device)
    step = max(_EXPANDED_AT_ONCE // state.blocksize, 2) * state.blocksize
    for start in range(0, count, step):
        part = out[start : start + step]
        values = state.values[unpack(data[start // 2 :], part.numel())]
        blocks = scales[start // state.blocksize :][: -(-part.numel() // state.blocksize)]
        part.copy_(values.mul_(blocks.repeat_interleave(state.blocksize)[: part.numel()]))
    return out.view(state.shape)


def _fields(name: str, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The quant_state's JSON, and the companions that are tensors."""
    fields: dict[str, Any] = {}
    companions = {}
    for key, tensor in tensors.items():
        if "quant_state." in key:
            try:
                fields = dict(json.loads(bytes(tensor.cpu().numpy())))
            except (ValueError, TypeError) as e:
                raise CheckpointError(f"damaged: the quant_state of {name} is not JSON: {e}") from e
        else:
            companions[key.rpartition(".")[2]] = tensor
    return fields, companions


def _check_sizes(name: str, packed: Tensor, state: PackedState) -> None:
    count = math.prod(state.shape)
    if state.blocksize < 2 or state.blocksize & (state.blocksize - 1) or state.values.numel() != 16:
        raise CheckpointError(
            f"damaged: {name} has blocks of {state.blocksize} and a table of {state.values.numel()} values"
        )
    blocks = -(-count // state.blocksize)
    groups = -(-blocks // state.nested_blocksize) if state.nested_blocksize > 0 else 0
    sizes = [("codes", packed.nbytes, (count + 1) // 2), ("absmax", state.absmax.numel(), blocks)]
    if state.nested_absmax is not None and state.nested_values is not None:
        sizes.append(("nested_absmax", state.nested_absmax.numel(), max(groups, 1)))
        sizes.append(("nested_quant_map", state.nested_values.numel(), 256))
    for what, found, needed in sizes:
        if found != needed:
            raise CheckpointError(
                f"damaged: {name} is {list(state.shape)} in blocks of {state.blocksize}, which takes {needed} of {what};"
                f" there are {found}"
            )
    if (state.nested_absmax is None) != state.absmax.is_floating_point():
        raise CheckpointError(f"damaged: the absmax of {name} is of {state.absmax.dtype}")


def _check_values(name: str, state: PackedState) -> None:
    tables = {table: get_4bit_type(table, device=state.values.device) for table in ("nf4", "fp4")}
    if state.table not in tables:
        raise CheckpointError(f"{name} is in bitsandbytes' {state.table}; NF4 and FP4 are served")
    if not torch.allclose(state.values, tables[state.table], rtol=0, atol=1e-4):
        other = next((n for n, t in tables.items() if torch.allclose(state.values, t, rtol=0, atol=1e-4)), None)
        raise CheckpointError(
            f"damaged: {name} says that it is in {state.table}, and its quant_map is"
            f" {f'that of {other}' if other else f'not the table of {state.table}'}"
        )
    scales = [state.nested_absmax, state.nested_values] if state.nested_absmax is not None else [state.absmax]
    if not math.isfinite(state.nested_offset) or not all(bool(s.isfinite().all()) for s in scales if s is not None):
        raise CheckpointError(f"damaged: the scales (absmax) of {name} are not finite numbers")
