"""Inductor's choices for the small kernels between products, by rule instead of by timing.

Such a kernel takes one to three microseconds, which is what a launch by itself takes: timed alone, as inductor does when
an engine starts, two ways of cutting its work look alike, and the one that happens to win may be twice as slow between
two products. A whole decode step so became up to 4 % slower, differently from start to start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Rows of a norm up to here are read once and kept in registers; inductor's own limit is 1024.
_LONGEST_ROW = 16384
# Compiled code is cached on disk by what is compiled; what is chosen here goes into the name.
_CACHE_TAG = "small kernels by rule"
# How the names of blocks begin that are not along what is reduced; in joint kernels each part may have its own.
_BLOCKS = ("XBLOCK", "YBLOCK", "ZBLOCK")


@contextmanager
def small_kernels_by_rule() -> Iterator[None]:
    """Kernels compiled and first run while this is entered have the smallest blocks; norms keep a row in registers.

    What does not depend on one another, queries' and keys' norms and rotations, is one launch.
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
        if not _take_smallest_blocks(kernel):
            tune(kernel, *args, **kwargs)

    deciding.should_use_persistent_reduction = staticmethod(should_use_persistent_reduction)
    tuning.autotune_to_one_config = autotune_to_one_config
    try:
        # What an earlier start has timed and kept beside its code does not count.
        with (
            torch._inductor.config.patch(autotune_local_cache=False, combo_kernels=True),
            config.patch(cache_key_tag=f"{config.cache_key_tag}{_CACHE_TAG}"),
        ):
            yield
    finally:
        deciding.should_use_persistent_reduction = staticmethod(persistent)
        tuning.autotune_to_one_config = tune


def _is_a_norm(features: Any) -> bool:
    """Whether a reduction goes along rows that lie in memory as they are, of a known length that is not too large."""
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    short: bool = V.graph.sizevars.statically_known_leq(features.reduction_numel, _LONGEST_ROW)
    return features.get_reduction_hint() == ReductionHint.INNER and short


def _take_smallest_blocks(kernel: Any) -> bool:
    """Leave a kernel only the launcher with the smallest blocks, then the fewest warps; False where none is the smallest.

    A loop's kernel has blocks along what it loops over, too, which cannot be too large.
    """
    from torch._inductor.runtime.hints import HeuristicType

    if kernel.heuristic_type not in (HeuristicType.POINTWISE, HeuristicType.PERSISTENT_REDUCTION):
        return False

    def size(launcher: Any) -> tuple[int, int]:
        blocks = (size for name, size in launcher.config.kwargs.items() if name.startswith(_BLOCKS))
        return math.prod(blocks), launcher.config.num_warps

    kernel.launchers = [min(kernel.launchers, key=size)]
    return True
