"""What the Triton attention kernels are compiled for, handed to them as constants."""

from __future__ import annotations

from dataclasses import dataclass

_DOT_ROWS = 16  # the fewest rows that tl.dot takes


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

    @property
    def width(self) -> int:
        """Elements of a token's keys in all heads."""
        return self.kv_heads * self.dim


@dataclass(frozen=True)
class DecodeInstance:
    """The constants of one compiled decode_kernel._attend."""

    cache: CacheShape
    group: int
    """Query heads that share a key head."""
    counted: int
    """Where in numbers the number of items lies."""
    pitch: int
    """KV blocks of a row of the block tables."""
    tile: int
    """Keys of a tile."""
    stages: int
    """Tiles that are being loaded at a time."""
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
    written: bool
    """Whether the launch in front has written the new keys and values."""

    @property
    def few(self) -> int:
        """The least power of 2 that holds the group."""
        return 1 << (self.group - 1).bit_length()

    @property
    def rows(self) -> int:
        """Rows of the queries' matrix in tl.dot; those behind the group are zeros."""
        return max(_DOT_ROWS, self.few)
