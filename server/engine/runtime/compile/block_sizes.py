"""Inductor's block sizes for the small kernels between GEMMs, chosen by rule instead of by timing.

Such a kernel takes one to three microseconds, as long as its launch alone. Inductor would time each block size when an
engine starts; two of them then look alike, and the one that happens to win may be twice as slow between two GEMMs. Whole
decode steps became up to 4 % slower that way, differently from start to start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Rows of a norm up to here are read once and kept in registers; inductor's own limit is 1024.
_LONGEST_ROW = 16384
# Compiled code is cached on disk by what is compiled. The tag keeps code with these block sizes apart.
_CACHE_TAG = "small kernels by rule"
# From so many elements on, larger blocks are faster: a thread then reads 16 bytes at once.
_MANY_ELEMENTS = 2 << 20
# The names of the block sizes of dimensions that are not reduced begin with these; each part of a joint kernel has its own.
_BLOCKS = ("XBLOCK", "YBLOCK", "ZBLOCK")


@contextmanager
def small_kernels_by_rule() -> Iterator[None]:
    """While entered, kernels that are compiled and first run get their blocks by rule; norms keep a row in registers.

    Operations that do not depend on one another, such as queries' and keys' norms, become one launch.
    """
    # Takes a second to import, and only CUDA needs it.
    from torch._inductor import choices
    from torch._inductor.runtime import triton_heuristics

    deciding: Any = choices.InductorChoices
    tuning: Any = triton_heuristics.CachingAutotuner
    config: Any = torch.compiler.config
    persistent, tune = deciding.should_use_persistent_reduction, tuning.autotune_to_one_config

    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        return _is_a_norm(features) or bool(persistent(features, cooperative_reduction))

    def autotune_to_one_config(kernel: Any, *args: Any, **kwargs: Any) -> None:
        if not _take_blocks(kernel):
            tune(kernel, *args, **kwargs)

    deciding.should_use_persistent_reduction = staticmethod(should_use_persistent_reduction)
    tuning.autotune_to_one_config = autotune_to_one_config
    try:
        # Timings that an earlier start has kept beside its code are ignored.
        with (
            torch._inductor.config.patch(autotune_local_cache=False, combo_kernels=True),
            config.patch(cache_key_tag=f"{config.cache_key_tag}{_CACHE_TAG}"),
        ):
            yield
    finally:
        deciding.should_use_persistent_reduction = staticmethod(persistent)
        tuning.autotune_to_one_config = tune


def _is_a_norm(features: Any) -> bool:
    """Whether a reduction goes along contiguous rows of a known length that is not too large."""
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    short: bool = V.graph.sizevars.statically_known_leq(features.reduction_numel, _LONGEST_ROW)
    return features.get_reduction_hint() == ReductionHint.INNER and short


def _take_blocks(kernel: Any) -> bool:
    """Leave a kernel one launcher; False for kernels with loops.

    It is the one with the smallest blocks, then the fewest warps, or the one with the largest blocks where a kernel without
    a reduction has many elements. A loop's kernel also has a block size along the reduced dimension, where larger is not
    worse.
    """
    from torch._inductor.runtime.hints import HeuristicType

    if kernel.heuristic_type not in (HeuristicType.POINTWISE, HeuristicType.PERSISTENT_REDUCTION):
        return False

    def size(launcher: Any) -> tuple[int, int]:
        blocks = (size for name, size in launcher.config.kwargs.items() if name.startswith(_BLOCKS))
        return math.prod(blocks), -launcher.config.num_warps if large else launcher.config.num_warps

    elements = math.prod((kernel.size_hints or {}).values())
    large = kernel.heuristic_type == HeuristicType.POINTWISE and elements >= _MANY_ELEMENTS
    kernel.launchers = [(max if large else min)(kernel.launchers, key=size)]
    return True
