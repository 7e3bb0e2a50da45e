"""bitsandbytes' NF4 storage: the codebook, packed nibbles, block scales plain and nested.

Source of the codebook: the QLoRA paper (2305.14314), appendix E, as bitsandbytes stores it in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

CODEBOOK = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Value of each 4-bit code, exactly representable in float32."""

_FP4 = (
    0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
)  # fmt: skip
TABLES: dict[str, tuple[float, ...]] = {"nf4": CODEBOOK, "fp4": (*_FP4, *(-value if value else 0.0 for value in _FP4))}
"""Values of the codes by bitsandbytes' name of the type; FP4 is a sign and 0, 1/16, 8, 12, 4, 6, 2, 3 by 12."""

NESTED_BLOCKSIZE = 256
"""Scales per float32 scale, where the scales are quantized themselves (double quantization)."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One NF4 weight as the kernels take it; see docs/architecture.md for the layout.

    packed uint8 with (numel + 1) // 2 elements; absmax float32, one per block, or one per 256 blocks where absmax_8bit
    (uint8, one per block), absmax_code (float32 [256]) and absmax_offset (float32, one element or as many as absmax) are
    given. Two weights are equal where they are the same object.

    A shard of a nested weight keeps the whole one's groups of 256 blocks: group_offset blocks lie in front of the shard in
    the first of its groups, and group_skip blocks of the whole weight between the ends and beginnings of its rows.

    table names what codes stand for (TABLES). The ops and CUDA take NF4 alone; cpu and reference take both.
    """

    packed: Tensor
    shape: tuple[int, ...]
    absmax: Tensor
    blocksize: int
    absmax_8bit: Tensor | None = None
    absmax_code: Tensor | None = None
    absmax_offset: Tensor | None = None
    group_offset: int = 0
    group_skip: int = 0
    table: str = "nf4"

    SCHEMA: ClassVar[str] = (
        "Tensor packed, SymInt[] shape, Tensor absmax, int blocksize, Tensor? absmax_8bit, Tensor? absmax_code,"
        " Tensor? absmax_offset, int group_offset, int group_skip"
    )
    """A weight in an op's schema: what arguments() gives and of() takes."""

    def arguments(self) -> tuple[Any, ...]:
        """The op's arguments of SCHEMA. ValueError for a table other than NF4's, which the ops do not have."""
        if self.table != "nf4":
            raise ValueError(f"the ops take NF4 alone, and this weight is in {self.table}")
        return (
            self.packed, list(self.shape), self.absmax, self.blocksize,
            self.absmax_8bit, self.absmax_code, self.absmax_offset, self.group_offset, self.group_skip,
        )  # fmt: skip

    @classmethod
    def of(cls, packed: Tensor, shape: Sequence[int], *rest: Any) -> Weight:
        """The weight of an op's arguments."""
        return cls(packed, tuple(shape), *rest)

    @classmethod
    def from_quant_state(cls, packed: Tensor, state: Any, tables: Collection[str] = ("nf4",)) -> Weight:
        """The weight of a bitsandbytes tensor and its QuantState.

        ValueError for a type without a table, and for scales nested in other blocks than 256.
        """
        if state.quant_type not in tables:
            raise ValueError(f"quant_type must be {' or '.join(tables)}, got {state.quant_type}")
        if getattr(state, "packing_format_for_cpu", False):
            raise ValueError("bitsandbytes has repacked this weight for its own CPU kernel, lossily")
        data = packed.data.reshape(-1)
        data = data if data.dtype == torch.uint8 else data.view(torch.uint8)
        shape = tuple(int(size) for size in state.shape)
        if not state.nested:
            return cls(data, shape, state.absmax.float(), int(state.blocksize), table=state.quant_type)
        if state.state2.blocksize != NESTED_BLOCKSIZE:
            raise ValueError(f"nested scales must be in blocks of {NESTED_BLOCKSIZE}, got {state.state2.blocksize}")
        nested = state.state2
        return cls(
            data, shape, nested.absmax.float(), int(state.blocksize), state.absmax, nested.code.float(), state.offset,
            table=state.quant_type,
        )  # fmt: skip

    @property
    def nested(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """absmax_8bit, absmax_code and absmax_offset; all None if plain."""
        return self.absmax_8bit, self.absmax_code, self.absmax_offset

    @property
    def has_own_groups(self) -> bool:
        """Whether block i is of group i // 256, as in every weight that is no shard."""
        return self.group_offset == 0 and self.group_skip == 0

    @property
    def matrix(self) -> tuple[int, int]:
        """(n, k). ValueError where the weight has other than two dimensions."""
        if len(self.shape) != 2:
            raise ValueError(f"shape must be [N, K], got {list(self.shape)}")
        return self.shape[0], self.shape[1]

    def expert(self, index: int) -> Weight:
        """Expert index's [n, k] of a weight [experts, n, k] that check_experts() has passed; views of its tensors."""
        _, n, k = self.shape
        codes, blocks = n * k // 2, n * k // self.blocksize
        packed = self.packed.reshape(-1)[index * codes : (index + 1) * codes]
        if self.absmax_8bit is None:
            absmax = self.absmax.reshape(-1)[index * blocks : (index + 1) * blocks]
            return Weight(packed, (n, k), absmax, self.blocksize, table=self.table)
        absmax_8bit = self.absmax_8bit.reshape(-1)[index * blocks : (index + 1) * blocks]
        groups = -(-blocks // NESTED_BLOCKSIZE)
        own = slice(index * groups, (index + 1) * groups)
        absmax, offset = self.absmax.reshape(-1)[own], self.absmax_offset
        if offset is not None and offset.numel() > 1:
            offset = offset.reshape(-1)[own]
        return Weight(packed, (n, k), absmax, self.blocksize, absmax_8bit, self.absmax_code, offset, table=self.table)

    def contiguous(self) -> Weight:
        """This weight if all its tensors are contiguous, else a weight of contiguous copies."""
        if self.packed.is_contiguous() and self.absmax.is_contiguous():
            if self.absmax_8bit is None:
                return self
            if all(tensor is None or tensor.is_contiguous() for tensor in self.nested):
                return self
        packed, absmax = self.packed.contiguous(), self.absmax.contiguous()
        codes, table, offset = (t if t is None else t.contiguous() for t in self.nested)
        return replace(self, packed=packed, absmax=absmax, absmax_8bit=codes, absmax_code=table, absmax_offset=offset)


def with_weight(function: Callable[..., Tensor], place: int) -> Callable[..., Tensor]:
    """An op's function, of Weight.SCHEMA at a place among its arguments, of one that takes a Weight there."""
    end = place + len(Weight.SCHEMA.split(", "))

    def op(*arguments: Any) -> Tensor:
        return function(*arguments[:place], Weight.of(*arguments[place:end]), *arguments[end:])

    return op


def check(weight: Weight) -> int:
    """Check that packed and the scales cover shape, and give its number of elements. ValueError names what is too short."""
    count = math.prod(weight.shape)
    packed, absmax, absmax_8bit, blocksize = weight.packed, weight.absmax, weight.absmax_8bit, weight.blocksize
    if blocksize < 1 or blocksize & (blocksize - 1):
        raise ValueError(f"blocksize must be a power of two, got {blocksize}")
    if weight.table not in TABLES:
        raise ValueError(f"table must be one of {tuple(TABLES)}, got {weight.table!r}")
    if packed.dtype != torch.uint8:
        raise ValueError(f"packed must be uint8, got {packed.dtype}")
    if packed.numel() < (count + 1) // 2:
        raise ValueError(f"packed has {packed.numel()} bytes, shape {list(weight.shape)} needs {(count + 1) // 2}")
    blocks = -(-count // blocksize)
    scales = blocks if absmax_8bit is None else nested_groups(weight, blocks)
    if absmax.dtype != torch.float32 or absmax.numel() < scales:
        raise ValueError(f"absmax must be float32 with {scales} elements, got {absmax.dtype} with {absmax.numel()}")
    if absmax_8bit is not None and (absmax_8bit.dtype != torch.uint8 or absmax_8bit.numel() < blocks):
        raise ValueError(f"absmax_8bit must be uint8 with {blocks} elements, got {absmax_8bit.numel()}")
    return count


def check_experts(weight: Weight) -> tuple[int, int, int]:
    """(experts, n, k) of a weight whose every expert begins with a scale block and, where nested, with a group of 256.

    ValueError as check(), and for a shard and where experts share a block or a group.
    """
    if len(weight.shape) != 3:
        raise ValueError(f"shape must be [experts, N, K], got {list(weight.shape)}")
    experts, n, k = weight.shape
    if n * k % weight.blocksize or weight.blocksize < 2:
        raise ValueError(f"experts of [{n}, {k}] are no whole scale blocks of {weight.blocksize}")
    if not weight.has_own_groups:
        raise ValueError("experts are not divided into shards: group_offset and group_skip must be 0")
    if weight.absmax_8bit is not None and n * k // weight.blocksize % NESTED_BLOCKSIZE:
        raise ValueError(
            f"experts of [{n}, {k}] are no whole groups of {NESTED_BLOCKSIZE} scale blocks of {weight.blocksize};"
            " expand their nested scales"
        )
    check(weight)
    if weight.absmax_8bit is not None:
        second_level(weight)
    return experts, n, k


def nested_groups(weight: Weight, blocks: int) -> int:
    """Number of groups that a nested weight's blocks reach into. ValueError for a shard's geometry that cannot be."""
    offset, skip, last = weight.group_offset, weight.group_skip, blocks - 1
    if offset < 0 or skip < 0:
        raise ValueError(f"group_offset and group_skip must be at least 0, got {offset} and {skip}")
    if skip:
        k = weight.matrix[1]
        if k % weight.blocksize:
            raise ValueError(f"a shard's rows must be whole scale blocks of {weight.blocksize}, got K = {k}")
        last += last // (k // weight.blocksize) * skip
    return (offset + last) // NESTED_BLOCKSIZE + 1 if blocks else 0


def second_level(weight: Weight) -> tuple[Tensor, Tensor, Tensor, int]:
    """A nested weight's absmax_8bit, absmax_code and absmax_offset, and 1 where every absmax has an offset of its own.

    0 where absmax_offset (float32) is one element for the whole weight. bitsandbytes has one; weights joined along N bring
    theirs. ValueError where one of the tensors is missing, and for any other number or dtype of offsets.
    """
    if weight.absmax_8bit is None or weight.absmax_code is None or weight.absmax_offset is None:
        raise ValueError("absmax_8bit needs absmax_code and absmax_offset beside it")
    offsets, groups = weight.absmax_offset.numel(), weight.absmax.numel()
    if weight.absmax_offset.dtype != torch.float32 or offsets not in (1, groups):
        raise ValueError(
            f"absmax_offset must be float32 with 1 element, or {groups} as absmax,"
            f" got {weight.absmax_offset.dtype} with {offsets}"
        )
    return weight.absmax_8bit, weight.absmax_code, weight.absmax_offset, 0 if offsets == 1 else 1


def unpack(packed: Tensor, count: int) -> Tensor:
    """The first count 4-bit codes as int64, in order: the high nibble of a byte comes first."""
    data = packed.reshape(-1)[: (count + 1) // 2]
    return torch.stack((data >> 4, data & 15), dim=1).reshape(-1)[:count].long()


def block_scales(weight: Weight) -> Tensor:
    """Scale of every block, float32; nested scales are expanded with one rounding per operation."""
    if weight.absmax_8bit is None:
        return weight.absmax.reshape(-1)
    absmax_8bit, absmax_code, absmax_offset, stride = second_level(weight)
    codes = absmax_code.reshape(-1)[absmax_8bit.reshape(-1).long()]
    places = torch.arange(codes.numel(), device=codes.device)
    if weight.group_skip:
        places += places // (weight.matrix[1] // weight.blocksize) * weight.group_skip
    groups = (places + weight.group_offset) // NESTED_BLOCKSIZE
    offsets = absmax_offset.reshape(-1)
    return codes * weight.absmax.reshape(-1)[groups] + (offsets[groups] if stride else offsets)
