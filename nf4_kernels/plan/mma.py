"""linear_mma: which launches a GPU without wgmma can do for a GEMM, and what they cost. For 1 to 128 tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from nf4_kernels.plan.limits import COUNTERS, NORM_K

TILE_ROWS = 256
"""Weight rows of a tile."""
K_STEP = 64
"""k of a step, the unit of work that stream-K hands out."""
MMA_TOKENS = range(1, 129)
"""With more tokens dequantization + cuBLAS was measured to be faster."""
# The instances of csrc/cuda/mma_sm80/instances.cuh, by warps and the tokens of a tile -> a launch without any k step, a k
# step, and what parts of two tiles in one thread block add, in microseconds of code for sm_86, fitted to
# bench/results/posed-86-nvidia-h200.json; 96 tokens to those of an H100.
MMA_COSTS = {
    (8, 8): (7.4, 0.46, 2.1),
    (8, 16): (7.2, 0.538, 1.9),
    (8, 24): (7.1, 0.688, 2.0),
    (8, 32): (7.6, 0.704, 2.9),
    (8, 48): (7.8, 0.956, 4.1),
    (8, 64): (8.3, 1.1, 4.5),
    (8, 96): (11.2, 1.81, 0.0),
}
_MIN_STEPS = 2
"""k steps of a thread block, if it has parts of one tile only: fewer are not faster."""


class WholeInstance(NamedTuple):
    """An instance of csrc/cuda/mma_sm80/whole/."""

    warps: int
    """The most warps of a thread block, without the one that loads activations."""
    row_tiles: int
    """16 weight rows each, of a warp."""
    chunk: int
    """k blocks of a k warp in a chunk of activations; four are a step."""


WHOLE_INSTANCES = {
    8: WholeInstance(15, 1, 2),
    16: WholeInstance(15, 1, 2),
    24: WholeInstance(15, 1, 1),
    32: WholeInstance(15, 1, 1),
    48: WholeInstance(7, 2, 1),
    64: WholeInstance(7, 2, 1),
}
"""By the tokens of a tile."""
_QUARTER_SLOTS = 128
"""Tokens of a k block that a chunk may have."""
# By the tokens of a tile, in microseconds: a launch, what each tile of a thread block but the first one adds, and 64 k of 16
# rows. Of code for sm_86, fitted to bench/results/posed-86-nvidia-h200.json.
_WHOLE_COSTS = {
    8: (10.8, 6.9, 0.0239),
    16: (11.4, 7.1, 0.0281),
    24: (13.6, 9.6, 0.0304),
    32: (19.3, 15.4, 0.0287),
    48: (9.4, 7.6, 0.0469),
    64: (11.2, 9.6, 0.0587),
}
_MAX_K_WARPS = 2
"""One warp loads activations: with more it is too slow."""
_BUSY_TILES = 11
"""Fewer tiles of 16 rows do not keep a multiprocessor busy."""


@dataclass(frozen=True)
class Mma:
    """linear_mma: weights decoded into mma.sync's register operand; the fields are MmaPlan of params.h.

    warps: those of a thread block; or minus those that have rows of their own if thread blocks compute whole tiles (whole/).
    """

    tokens: int
    warps: int
    grid: int

    def k_warps(self, k: int) -> int:
        """Warps that share the k of the same rows: as many as there is room for, or fewer that take no more steps."""
        if self.warps > 0:
            return 1
        instance = WHOLE_INSTANCES[self.tokens]
        most = min(instance.warps // -self.warps, _QUARTER_SLOTS // (instance.chunk * self.tokens))
        steps = -(-k // (K_STEP * 4 * most))
        return -(-k // (K_STEP * 4 * steps))

    @property
    def tile_rows(self) -> int:
        """Weight rows of a tile."""
        return -self.warps * WHOLE_INSTANCES[self.tokens].row_tiles * 16 if self.warps < 0 else TILE_ROWS

    def workspace_bytes(self, m: int, n: int, k: int) -> int:
        """Normalised tokens, should there be any, and partial sums of two tiles for each thread block if tiles are split."""
        norm = -(-m * k * 2 // 256) * 256 if k <= NORM_K else 0
        return norm + (self.grid * 2 * TILE_ROWS * self.tokens * 4 if self.warps > 0 else 0)

    def __str__(self) -> str:
        kind = f"{-self.warps} row warps" if self.warps < 0 else f"{self.warps} warps"
        return f"mma: {self.tokens} tokens x {self.tile_rows} rows, {kind}, grid {self.grid}"


def mma_candidates(m: int, n: int, k: int, multiprocessors: int) -> Iterator[Mma]:
    """Launches of whole tiles by the smallest instance that has room for all tokens, and of stream-K.

    Of stream-K's the smallest instances with one or two token tiles, on all multiprocessors; and if there are enough of
    them, with as many thread blocks for each tile.
    """
    for tokens in [t for t in WHOLE_INSTANCES if m <= t][:1]:
        for row_warps in range(1, WHOLE_INSTANCES[tokens].warps + 1):
            tiles = -(-n // Mma(tokens, -row_warps, 1).tile_rows)
            whole = Mma(tokens, -row_warps, -(-tiles // -(-tiles // multiprocessors)))
            if whole.k_warps(k) <= _MAX_K_WARPS:
                yield whole
    seen = set()
    for warps, tokens in MMA_COSTS:
        token_tiles = -(-m // tokens)
        tiles = -(-n // TILE_ROWS) * token_tiles
        if token_tiles not in seen and token_tiles <= 2 and tiles <= COUNTERS:
            seen.add(token_tiles)
            steps = k // K_STEP
            if tiles <= multiprocessors:
                yield Mma(tokens, warps, tiles * min(multiprocessors // tiles, max(1, steps // _MIN_STEPS)))
            yield Mma(tokens, warps, min(multiprocessors, tiles * steps))


def mma_cost(mma: Mma, m: int, n: int, k: int) -> float:
    """Estimate microseconds of a launch on those GPUs."""
    if mma.warps < 0:
        launch, tile, block = _WHOLE_COSTS[mma.tokens]
        k_warps = mma.k_warps(k)
        at_once = -mma.warps * WHOLE_INSTANCES[mma.tokens].row_tiles * k_warps
        tiles = -(-(-(-n // mma.tile_rows) * -(-m // mma.tokens)) // mma.grid)
        blocks = tiles * math.ceil(k / (K_STEP * 4 * k_warps)) * 4 * max(at_once, _BUSY_TILES)
        return launch + tile * (tiles - 1) + block * blocks
    tiles, steps = -(-n // TILE_ROWS) * -(-m // mma.tokens), k // K_STEP
    launch, step, two_tiles = MMA_COSTS[mma.warps, mma.tokens]
    if mma.grid % tiles == 0:
        return launch + step * max(_MIN_STEPS, math.ceil(steps / (mma.grid // tiles)))
    return launch + step * math.ceil(tiles * steps / mma.grid) + two_tiles
