"""Small operations that launches next to them take along: products norms, sums, gates; attention norms and rotations.

torch.compile makes a kernel of each sum with its norm. Where nf4_kernels has a launch for it, the products do both: a
pass over inductor's graphs puts nf4::fused_linear in place of these nodes. Queries' and keys' norms and rotations are
rotations.py's, gated activations gates.py's, products that need no arranging launch arrangements.py's.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from nf4_kernels import cuda, ops
from server.engine.runtime.compile.passes.gates import fuse_gates
from server.engine.runtime.compile.passes.matching import (
    HasLaunch,
    Norm,
    alike,
    arguments_of,
    erase_unused,
    in_order,
    is_view,
    norm_of,
    operands,
    product_of,
    reshaped,
    untouched,
    with_value,
)
from server.engine.runtime.compile.passes.rotary import fuse_rotations
from server.engine.runtime.compile.passes.tiled_inputs import TileRows, fuse_arrangements

aten = torch.ops.aten


@contextmanager
def fused_operations(rotates: bool = False) -> Iterator[None]:
    """What inductor compiles while this is entered goes through the pass; one that is there already stays alone.

    rotates: whether the attention does norms and rotations of queries and keys.
    """
    # Takes a second and more to import, and only those who compile need it.
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    if config.post_grad_custom_pre_pass:
        yield
        return
    # As if derived from it: its uuid() is asked for only of such, and code is kept on disk only with one.
    CustomGraphPass.register(FusedOperations)
    with config.patch(post_grad_custom_pre_pass=FusedOperations(rotates=rotates)):
        yield


class FusedOperations:
    """The pass, for torch._inductor.config.post_grad_custom_pre_pass.

    There the graph is functional: an operation that writes to its arguments is an auto_functionalized node, whose results
    take the written tensor's place for all later nodes, and inputs are written to by copies at the end. So a value may be
    read later than it was: by a product at the place of the sum or of the gated activation, by a product instead of a
    norm. Only what is in front of the first node that does write is touched. (Writing in place again comes after this
    pass, and sees its nodes.)
    """

    def __init__(
        self,
        fuses: HasLaunch | None = None,
        rotates: bool = False,
        tile_rows: TileRows | None = None,
        gates: HasLaunch | None = None,
    ) -> None:
        """fuses, tile_rows, gates: those of ops if None. rotates: see fused_operations()."""
        self._fuses = fuses
        self._rotates = rotates
        self._tile_rows = tile_rows
        self._gates = gates

    def uuid(self) -> bytes | None:
        """What compiled code is kept by; None, and it is not kept, where something else than nf4_kernels decides."""
        own = all(given is None for given in (self._fuses, self._tile_rows, self._gates))
        return _sources() + bytes([self._rotates]) if own else None

    def __call__(self, graph: Graph) -> None:
        """Rewrite the graph in place."""
        nodes = untouched(graph)
        products = [node for node in nodes if node.target is torch.ops.nf4.linear.default and self._fits(node, False)]
        for node in nodes:
            found = _residual_sum(node, products)
            if found is not None:
                product, residual = found
                products[products.index(product)] = _fuse_residual(node, product, residual)
        for i, product in enumerate(products):
            x = arguments_of(product)["x"]
            while is_view(x):
                x = x.args[0]
            norm = _norm(x)
            if norm is not None and self._fits(product, True) and _only_multiplied(x, products):
                products[i] = _fuse_norm(product, norm)
        fuse_gates(nodes, products, self._gates or ops.can_gate)
        if self._rotates:
            fuse_rotations(nodes)
        fuse_arrangements(products, self._tile_rows or ops.token_tile)

    def _fits(self, product: Node, normalised: bool) -> bool:
        """Whether there is a fused launch for the product."""
        arguments = arguments_of(product)
        x, shape = arguments["x"].meta["val"], arguments["shape"]
        # In float16, what a norm leaves times its weight may be too large. Sizes that vary are not ints.
        if x.dtype != torch.bfloat16 or not all(isinstance(size, int) for size in (*x.shape, *shape)):
            return False
        fuses = self._fuses or ops.can_fuse
        return x.is_contiguous() and fuses(*product_of(product), normalised)


@functools.cache
def _sources() -> bytes:
    """A digest of everything that decides what the pass does, but for the GPU, which inductor itself asks about."""
    runtime = Path(__file__).parents[2]
    paths = sorted(runtime.rglob("*.py"))
    paths += sorted(Path(ops.__file__).parent.rglob("*.py"))
    state = cuda.load_error(), [path.read_bytes() for path in paths]
    return hashlib.sha256(repr(state).encode()).digest()


def _residual_sum(node: Node, products: list[Node]) -> tuple[Node, Node] | None:
    """(product, residual) where the node is their sum and nothing else reads the product; else None.

    The residual cannot depend on the product then.
    """
    for term, residual in operands(node, aten.add.Tensor):
        product = term
        while is_view(product) and len(product.users) == 1:
            product = product.args[0]
        if product not in products or len(product.users) != 1 or arguments_of(product).get("residual") is not None:
            continue
        if isinstance(residual, Node) and residual is not term and alike(term, residual, term.meta["val"].shape):
            return product, residual
    return None


def _norm(node: Any) -> Norm | None:
    """The norm that products can do in place of the node: of rows that lie one after another, with the weight as it is."""
    norm = norm_of(node)
    return norm if norm is not None and not norm.offset and alike(node, norm.h, node.meta["val"].shape) else None


def _only_multiplied(node: Node, products: list[Node]) -> bool:
    """Whether all that reads a value, also through views, are products that multiply it.

    Else it is computed anyway, and a product that computed it again would gain nothing.
    """
    for user in node.users:
        if is_view(user):
            if not _only_multiplied(user, products):
                return False
            continue
        # One that has a norm multiplies something else than what it reads.
        if user not in products or arguments_of(user).get("norm_weight") is not None:
            return False
        if any(value is node for name, value in arguments_of(user).items() if name != "x"):
            return False
    return True


def _fuse_residual(total: Node, product: Node, residual: Node) -> Node:
    """The product with its residual, at the place of their sum."""
    shape = product.meta["val"].shape
    with total.graph.inserting_before(total):
        fused = _fused(product, residual=reshaped(residual, shape))
        total.replace_all_uses_with(reshaped(fused, total.meta["val"].shape))
    erase_unused(total)
    return fused


def _fuse_norm(product: Node, norm: Norm) -> Node:
    """The product of what the norm is of."""
    x = arguments_of(product)["x"]
    with product.graph.inserting_before(product):
        fused = _fused(product, x=reshaped(norm.h, x.meta["val"].shape), norm_weight=norm.weight, norm_eps=norm.eps)
    product.replace_all_uses_with(fused)
    erase_unused(product)
    return fused


def _fused(product: Node, **changes: Any) -> Node:
    """A node like product's with other arguments."""
    fused = torch.ops.nf4.fused_linear.default
    given = arguments_of(product) | changes
    return with_value(product.graph.call_function(fused, in_order(fused, given)), product.meta["val"])
