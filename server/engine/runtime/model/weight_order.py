"""The order in which a forward pass reads the model's NF4 weights, so that each GEMM prefetches the next one's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import nn

from nf4_kernels import prefetch_next
from server.checkpoint.experts.module import NF4Experts
from server.engine.runtime.model.projections import NF4Linear

# Numbers of tokens of the trial runs: a weight that follows another one in both runs does so for any number.
TRIALS = (1, 7)


def set_weight_order(model: nn.Module, run: Callable[[int], object]) -> int:
    """Tell the kernels each GEMM's next weight where that is always the same one; returns the number of such GEMMs.

    run(n) runs model on n tokens. GEMMs that a run calls several times or not at all have no next weight. Neither have those
    in front of a mixture of experts, which reads more than a cache keeps. GEMMs of CUDA graphs that are captured afterwards
    prefetch (see nf4_kernels.prefetch_next).
    """
    orders = []
    for count in TRIALS:
        with _recorded(model) as called:
            run(count)
        orders.append(called)
    once = [{id(linear) for linear in order if calls[id(linear)] == 1} for order, calls in _counted(orders)]
    always = set.intersection(*({(id(a), id(b)) for a, b in pairwise(order)} for order in orders))
    linked = 0
    for first, then in pairwise(orders[0]):
        follows = (id(first), id(then)) in always and all(id(first) in seen and id(then) in seen for seen in once)
        if follows and isinstance(first, NF4Linear) and isinstance(then, NF4Linear):
            prefetch_next(first.weight, then.weight)
            linked += 1
    return linked


def _counted(orders: list[list[nn.Module]]) -> Iterator[tuple[list[nn.Module], Counter[int]]]:
    for order in orders:
        yield order, Counter(id(linear) for linear in order)


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[nn.Module]]:
    """The layers called while entered, in order."""
    called: list[nn.Module] = []

    def hook(module: nn.Module, _: tuple[Any, ...]) -> None:
        called.append(module)

    readers = [module for module in model.modules() if isinstance(module, NF4Linear | NF4Experts)]
    handles = [module.register_forward_pre_hook(hook) for module in readers]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()
