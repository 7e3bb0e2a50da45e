"""Division of the widths of a model's MLPs and experts: in whole scale blocks, with zeros where these do not divide.

GLM-4.5-Air's dense layer has 171 blocks of 64 and gpt-oss' experts have 45. Every rank then has the same number of blocks,
and the last ones have fewer of the model's own and zeros behind them. A zero gate and a zero up make zero, which zeros of
down multiply, so that nothing changes.
"""

from __future__ import annotations

from typing import Any

WIDTHS = frozenset({
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
    "intermediate_size_mlp",
})  # fmt: skip
"""A configuration's widths of MLPs, of experts and of shared experts."""
MOST_PADDING = 8
"""A width may grow by this part of itself, an eighth; where more zeros were needed, it is not divided so."""


def widths_of(text: Any) -> dict[str, int]:
    """The widths of MLPs in a text model's configuration, by their names there."""
    found = {name: getattr(text, name, None) for name in sorted(WIDTHS)}
    if getattr(text, "block_auto_adjust_ff_dim", False):
        found["intermediate_size"] = _adjusted(text)
    return {name: width for name, width in found.items() if isinstance(width, int) and width > 0}


def _adjusted(text: Any) -> int:
    """The width of LFM2's MLP, whose class takes two thirds of what the configuration says, in whole multiples."""
    width = int(2 * text.intermediate_size / 3)
    if text.block_ffn_dim_multiplier is None:
        return width
    multiple: int = text.block_multiple_of
    return -(-int(text.block_ffn_dim_multiplier * width) // multiple) * multiple


def part_of_width(width: int, count: int, blocksize: int) -> int | None:
    """Part that each of count shards has of a width, zeros included; None if that would be too many zeros."""
    if width % blocksize:
        return None
    each = -(-width // (count * blocksize)) * blocksize
    return each if each * count == width or is_padded(width, each, count) else None


def is_padded(size: int, each: int, count: int) -> bool:
    """Whether count parts of a size hold it with zeros behind it.

    Parts that hold much more are no such parts: KV heads, each of which several shards have.
    """
    return size < each * count <= size + size // MOST_PADDING


def range_of(size: int, each: int, rank: int) -> range:
    """The part of the rank in 0 ... size - 1, each shard's part being `each` long; shorter where zeros are behind it."""
    return range(min(rank * each, size), min((rank + 1) * each, size))
