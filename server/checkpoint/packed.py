"""Tensors that bitsandbytes has packed to 4 bits: whether they are whole and fit, and their values in 16 bit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nf4_kernels import cpu
from nf4_kernels.format import NESTED_BLOCKSIZE, TABLES, Weight, block_scales, unpack
from server.checkpoint.base import CheckpointError

# How many values are expanded at once: their codes take half a gigabyte while they are looked up.
_EXPANDED_AT_ONCE = 1 << 24


def keeps_fp4(device: torch.device) -> bool:
    """Whether FP4 stays packed on a device: the CPU kernels have its table. Elsewhere it is expanded while loading."""
    return device.type == "cpu" and cpu.load_error() is None


def read_packed(name: str, tensors: Mapping[str, Tensor]) -> Weight:
    """The packed tensor of that name, from its codes ("weight") and their companions in the files by their last names.

    Raises CheckpointError, which names the tensor, for companions that are missing, too short or not finite, or whose table
    is not the one that they name.
    """
    fields, companions = _fields(name, tensors)
    codes = tensors["weight"].reshape(-1).view(torch.uint8)
    try:
        table, blocksize = str(fields["quant_type"]), int(fields["blocksize"])
        shape = tuple(int(size) for size in fields["shape"])
        values, absmax = companions["quant_map"].float().reshape(-1), companions["absmax"].reshape(-1)
        if "nested_absmax" in companions:
            groups, of_groups = (companions[part].float().reshape(-1) for part in ("nested_absmax", "nested_quant_map"))
            offset = groups.new_tensor([float(fields["nested_offset"])])
            weight = Weight(codes, shape, groups, blocksize, absmax, of_groups, offset, table=table)
            nested_blocksize = int(fields["nested_blocksize"])
        else:
            weight, nested_blocksize = Weight(codes, shape, absmax, blocksize, table=table), NESTED_BLOCKSIZE
    except KeyError as e:
        raise CheckpointError(f"damaged: {name} is packed to 4 bits and has no {e.args[0]}") from e
    except (OverflowError, TypeError, ValueError) as e:
        raise CheckpointError(f"damaged: the quant_state of {name} is not bitsandbytes': {e}") from e
    if nested_blocksize != NESTED_BLOCKSIZE:
        raise CheckpointError(f"{name} has scales in blocks of {nested_blocksize}; bitsandbytes has {NESTED_BLOCKSIZE}")
    _check_sizes(name, weight, values)
    _check_values(name, weight, values)
    return weight if weight.absmax_8bit is not None else replace(weight, absmax=weight.absmax.float())


def expand(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The packed tensor's values in dtype: float32 table entry times float32 scale, then one rounding."""
    count, size = math.prod(weight.shape), weight.blocksize
    table, scales = torch.tensor(TABLES[weight.table], device=weight.packed.device), block_scales(weight)
    out = torch.empty(count, dtype=dtype, device=weight.packed.device)
    step = max(_EXPANDED_AT_ONCE // size, 2) * size
    for start in range(0, count, step):
        part = out[start : start + step]
        values = table[unpack(weight.packed[start // 2 :], part.numel())]
        blocks = scales[start // size :][: -(-part.numel() // size)]
        part.copy_(values.mul_(blocks.repeat_interleave(size)[: part.numel()]))
    return out.view(weight.shape)


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


def _check_sizes(name: str, weight: Weight, values: Tensor) -> None:
    count, size = math.prod(weight.shape), weight.blocksize
    if size < 2 or size & (size - 1) or values.numel() != 16:
        raise CheckpointError(f"damaged: {name} has blocks of {size} and a table of {values.numel()} values")
    blocks = -(-count // size)
    scales = weight.absmax if weight.absmax_8bit is None else weight.absmax_8bit
    sizes = [("codes", weight.packed.numel(), (count + 1) // 2), ("absmax", scales.numel(), blocks)]
    if weight.absmax_8bit is not None and weight.absmax_code is not None:
        sizes.append(("nested_absmax", weight.absmax.numel(), max(1, -(-blocks // NESTED_BLOCKSIZE))))
        sizes.append(("nested_quant_map", weight.absmax_code.numel(), 256))
    for what, found, needed in sizes:
        if found != needed:
            raise CheckpointError(
                f"damaged: {name} is {list(weight.shape)} in blocks of {size}, which takes {needed} of {what};"
                f" there are {found}"
            )
    if scales.dtype is not torch.uint8 if weight.absmax_8bit is not None else not scales.is_floating_point():
        raise CheckpointError(f"damaged: the absmax of {name} is of {scales.dtype}")


def _check_values(name: str, weight: Weight, values: Tensor) -> None:
    tables = {table: torch.tensor(own, device=values.device) for table, own in TABLES.items()}
    if weight.table not in tables:
        raise CheckpointError(f"{name} is in bitsandbytes' {weight.table}; NF4 and FP4 are served")
    of_table = [table for table, own in tables.items() if torch.allclose(values, own, rtol=0, atol=1e-4)]
    if weight.table not in of_table:
        raise CheckpointError(
            f"damaged: {name} says that it is in {weight.table}, and its quant_map is"
            f" {f'that of {of_table[0]}' if of_table else f'not the table of {weight.table}'}"
        )
    largest = [part.abs().amax() for part in (weight.absmax, *weight.nested[1:]) if part is not None and part.numel()]
    bound = largest[0] if len(largest) < 3 else largest[0] * largest[1] + largest[2]
    if not bound.isfinite():
        raise CheckpointError(f"damaged: the scales (absmax) of {name} are not finite numbers")
