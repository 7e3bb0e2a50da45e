"""Tells the kernels in which order the model's NF4 products run, so that each brings the next one's weight closer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import nn

from nf4_kernels import Weight, prefetch_next
from server.engine.runtime.model.projections import NF4Linear

# Trial runs of so many tokens: what follows what in both of them does so whatever the tokens are.
TRIALS = (1, 7)


def link_products(model: nn.Module, run: Callable[[int], object]) -> int:
    """Name each product's successor wherever it is always the same; returns for how many. run(n) runs model on n tokens.

    Products that a run calls several times or not at all (experts of a mixture) have none. Products of CUDA graphs that
    are captured afterwards prefetch (see nf4_kernels.prefetch_next).
    """
    orders = []
    for count in TRIALS:
        with _recorded(model) as called:
            run(count)
        orders.append(called)
    once = [{id(product) for product in order if calls[id(product)] == 1} for order, calls in _counted(orders)]
    always = set.intersection(*({(id(a), id(b)) for a, b in pairwise(order)} for order in orders))
    linked = 0
    for first, then in pairwise(orders[0]):
        if (id(first), id(then)) in always and all(id(first) in seen and id(then) in seen for seen in once):
            prefetch_next(_weight(first), _weight(then))
            linked += 1
    return linked


def _counted(orders: list[list[NF4Linear]]) -> Iterator[tuple[list[NF4Linear], Counter[int]]]:
    for order in orders:
        yield order, Counter(id(product) for product in order)


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[NF4Linear]]:
    """The products called while entered, in order."""
    called: list[NF4Linear] = []

    def hook(module: nn.Module, _: tuple[Any, ...]) -> None:
        if isinstance(module, NF4Linear):
            called.append(module)

    handles = [m.register_forward_pre_hook(hook) for m in model.modules() if isinstance(m, NF4Linear)]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def _weight(product: NF4Linear) -> Weight:
    return Weight(
        product.packed,
        (product.out_features, product.in_features),
        product.absmax,
        product.blocksize,
        product.absmax_8bit,
        product.absmax_code,
        product.absmax_offset,
    )
