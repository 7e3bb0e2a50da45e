"""Forms that the Triton attention kernels are compiled for, handed to them as constants."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

# The fewest rows of tl.dot's result, and columns.
_DOT_ROWS, _DOT_COLUMNS = 16, 8
# Of the decode kernel: keys of a tile, and tiles that are being loaded at a time. Where an address comes from the block
# table, as all do, a load in the loop takes two stages with 8 bits.
_TILE, _STAGES = 64, 2
# A warp that has keys of its own holds all elements of all queries' sums. With as many as 8 queries of 128 elements have, a
# thread takes so few registers that a multiprocessor holds the four thread blocks that key_parts.py counts on. With more it
# holds two, and each loads two tiles at a time.
_MOST_SPLIT, _MOST_LEAN = 16 * 128, 8 * 128
_STAGES_LEAN, _REGISTERS_LEAN = 3, 128
_STAGES_WIDE = 5
# Where all warps take all keys of a tile, 64 in 8 bits would take 220 registers.
_TILE_8_BITS, _STAGES_8_BITS = 32, 3
# Of no more elements, of heads that are no longer, the sums of sixteen parts fit in 128 registers, as the rest of the kernel
# does.
_MOST_OF_SIXTEEN, _LONGEST_OF_SIXTEEN = 4 * 128, 128
# Heads of more elements have tiles of fewer keys and more warps, so that a thread holds no more of them.
_WARPS, _LONGEST = 4, 256
_TILE_LONG, _WARPS_LONG = 16, 8

# Over latents, whose rows are 576 elements: tiles of a thread block in 99 KB of shared memory.
_LATENT_TILE, _LATENT_STAGES, _LATENT_WARPS, _LATENT_COLUMNS = 32, 3, 4, 128


class Shared(IntEnum):
    """Ways in which several tokens of a launch may be of one sequence, one after another."""

    NO = 0
    WRITTEN = 1
    """The launch in front has written the new keys and values."""
    IN_ROWS = 2
    """A token attends to the new keys and values of those in front of it where they are given, and not in the cache."""


@dataclass(frozen=True)
class CacheShape:
    """The sizes of a layer's paged cache that its kernels know at compile time."""

    kv_heads: int
    dim: int
    """Elements of a head."""
    block_size: int
    """Tokens of a KV block."""
    limit: float
    """See key_tiles.quantization_limit()."""
    heads_first: bool = False
    """Whether a KV block's rows of one head lie beside one another; else those of one token do."""
    rest: int = 0
    """Of a cache of latents, elements of a token's row after the first dim, which are its value. All kv_heads, which are
    groups of query heads, read the same row. 0: there are keys and values."""

    @property
    def half(self) -> int:
        """Elements of a KV block's keys, behind which its values lie."""
        return self.block_size * self.kv_heads * self.dim

    @property
    def second(self) -> int:
        """Elements that kernels load for a token and head after its first dim: its value, or the rest of its latent."""
        return self.rest or self.dim

    @property
    def second_pitch(self) -> int:
        """Elements from a token's row of a head to these."""
        return self.dim if self.rest else self.half

    @property
    def block_pitch(self) -> int:
        """Elements from a KV block to the next one."""
        return self.block_size * (self.dim + self.rest) if self.rest else 2 * self.half

    @property
    def token_pitch(self) -> int:
        """Elements from a token's row of a head to the next token's."""
        if self.rest:
            return self.dim + self.rest
        return self.dim if self.heads_first else self.kv_heads * self.dim

    @property
    def head_pitch(self) -> int:
        """Elements from a token's row of a head to its row of the next head."""
        if self.rest:
            return 0
        return self.block_size * self.dim if self.heads_first else self.dim


@dataclass(frozen=True)
class DecodeInstance:
    """The constants of one compiled decode.triton_kernel._attend."""

    cache: CacheShape
    group: int
    """Query heads that share a key head."""
    counted: int
    """Place in numbers of the number of items."""
    pitch: int
    """KV blocks of a row of the block tables."""
    cap: float
    """The soft cap of scores times log2(e); 0: none."""
    tile_rows: int
    """Tokens of a tile of the result (reference.tile_activations); 0: the result is not tiled."""
    has_sinks: bool
    has_rotary: bool
    norms: bool
    """Whether queries and keys are normalised in front of the rotary embedding."""
    overlap: bool
    """Whether the launch starts before the one in front has ended (programmatic dependent launch)."""
    shared: Shared
    """Way in which several of the launch's tokens may be of one sequence."""

    @property
    def warps(self) -> int:
        """Warps of a thread block. With twice as many a thread has as much of a head of 512 elements as of one of 256."""
        if self.cache.rest:
            return _LATENT_WARPS
        return _WARPS_LONG if self.cache.dim > _LONGEST else _WARPS

    @property
    def few(self) -> int:
        """The least power of 2 that holds the group."""
        return 1 << (self.group - 1).bit_length()

    @property
    def reduced(self) -> int:
        """Number of parts' sums that the thread block that ends last loads at a time: each turn takes the latency of L2."""
        is_small = self.few * self.cache.dim <= _MOST_OF_SIXTEEN and self.cache.dim <= _LONGEST_OF_SIXTEEN
        return 16 if is_small else 8

    @property
    def reduced_columns(self) -> int:
        """Columns of these sums that it loads at a time: those of latents would not fit in registers."""
        return min(self.cache.dim, _LATENT_COLUMNS) if self.cache.rest else self.cache.dim

    @property
    def splits_tiles(self) -> bool:
        """Whether a tile's keys are divided among the warps (warp_tiles.py); the sums of more queries would not fit."""
        return self.cache.limit != 0 and max(_DOT_COLUMNS, self.few) * self.cache.dim <= _MOST_SPLIT

    @property
    def rows(self) -> int:
        """Rows of the queries' matrix, or its columns where it is the right operand; those behind the group are zeros."""
        return max(_DOT_COLUMNS if self.splits_tiles else _DOT_ROWS, self.few)

    @property
    def tile(self) -> int:
        """Keys of a tile."""
        if self.cache.rest:
            return _LATENT_TILE
        if self.cache.dim > _LONGEST:
            return _TILE_LONG
        return _TILE if self.splits_tiles or self.cache.limit == 0 else _TILE_8_BITS

    @property
    def stages(self) -> int:
        """Stages of the loop over tiles."""
        if self.cache.rest:
            return _LATENT_STAGES
        if not self.splits_tiles:
            return _STAGES if self.cache.limit == 0 else _STAGES_8_BITS
        return _STAGES_LEAN if self._lean else _STAGES_WIDE

    @property
    def _lean(self) -> bool:
        """Whether a thread of a warp that has keys of its own takes few registers."""
        return self.splits_tiles and self.rows * self.cache.dim <= _MOST_LEAN

    @property
    def most_registers(self) -> int | None:
        """Registers of a thread that the compiler may use; None: as many as there are."""
        return _REGISTERS_LEAN if self._lean or self.reduced == 16 else None
