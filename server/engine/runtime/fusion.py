"""NF4 products that take along what is around them: the norm of their input before, the sum with the residual after.

torch.compile makes a kernel of each sum with its norm. Where nf4_kernels has a launch for it, the products do both: a
pass over inductor's graphs puts nf4::fused_linear in place of these nodes.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from nf4_kernels import cuda, ops

aten, prims = torch.ops.aten, torch.ops.prims

Fuses = Callable[[torch.device, torch.dtype, int, Sequence[int], int, bool, bool], bool]
"""Whether there is a fused launch for (device, dtype, rows, [N, K], blocksize, nested, with a norm)."""

# Inductor turns views into reshapes before its passes run.
_VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


@contextmanager
def fused_products() -> Iterator[None]:
    """What inductor compiles while this is entered has its products fused; a pass that is there already stays alone."""
    # Takes a second and more to import, and only those who compile need it.
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    if config.post_grad_custom_pre_pass:
        yield
        return
    # As if derived from it: its uuid() is asked for only of such, and code is kept on disk only with one.
    CustomGraphPass.register(FusedProducts)
    with config.patch(post_grad_custom_pre_pass=FusedProducts()):
        yield


class FusedProducts:
    """The pass, for torch._inductor.config.post_grad_custom_pre_pass.

    There the graph is functional: an operation that writes to its arguments is an auto_functionalized node, whose results
    take the written tensor's place for all later nodes, and inputs are written to by copies at the end. So a value may be
    read later than it was: by a product at the place of the sum, by a product instead of a norm. Only what is in front
    of the first node that does write is touched. (Writing in place again comes after this pass, and sees its nodes.)
    """

    def __init__(self, fuses: Fuses | None = None) -> None:
        self._fuses = fuses

    def uuid(self) -> bytes | None:
        """What compiled code is kept by; None, and it is not kept, where something else than nf4_kernels decides."""
        return _sources() if self._fuses is None else None

    def __call__(self, graph: Graph) -> None:
        """Rewrite the graph in place."""
        nodes = list(takewhile(lambda node: not _writes(node), graph.nodes))
        products = [node for node in nodes if node.target is torch.ops.nf4.linear.default and self._fits(node, False)]
        for node in nodes:
            found = _residual_sum(node, products)
            if found is not None:
                product, residual = found
                products[products.index(product)] = _fuse_residual(node, product, residual)
        for i, product in enumerate(products):
            x = _arguments(product)["x"]
            while _is_view(x):
                x = x.args[0]
            norm = _norm(x)
            if norm is not None and self._fits(product, True) and _only_multiplied(x, products):
                products[i] = _fuse_norm(product, *norm)

    def _fits(self, product: Node, normalised: bool) -> bool:
        """Whether there is a fused launch for the product."""
        arguments = _arguments(product)
        x, shape = arguments["x"].meta["val"], arguments["shape"]
        # In float16, what a norm leaves times its weight may be too large. Sizes that vary are not ints.
        if x.dtype != torch.bfloat16 or not all(isinstance(size, int) for size in (*x.shape, *shape)):
            return False
        fuses = self._fuses or ops.fuses
        rows, nested = math.prod(x.shape[:-1]), arguments["absmax_8bit"] is not None
        return x.is_contiguous() and fuses(x.device, x.dtype, rows, shape, arguments["blocksize"], nested, normalised)


@functools.cache
def _sources() -> bytes:
    """A digest of everything that decides what the pass does, but for the GPU, which inductor itself asks about."""
    paths = [Path(__file__), *sorted(Path(ops.__file__).parent.glob("*.py"))]
    state = cuda.load_error(), [path.read_bytes() for path in paths]
    return hashlib.sha256(repr(state).encode()).digest()


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _arguments(node: Node) -> dict[str, Any]:
    """All arguments of a node by their names; its own list ends where only defaults follow."""
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = node.target._schema.arguments
    names = [argument.name for argument in arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in arguments}


def _residual_sum(node: Node, products: list[Node]) -> tuple[Node, Node] | None:
    """(product, residual) where the node is their sum and nothing else reads the product; else None.

    The residual cannot depend on the product then.
    """
    for term, residual in _operands(node, aten.add.Tensor):
        product = term
        while _is_view(product) and len(product.users) == 1:
            product = product.args[0]
        if product not in products or len(product.users) != 1 or _arguments(product).get("residual") is not None:
            continue
        if isinstance(residual, Node) and residual is not term and _alike(term, residual, term.meta["val"].shape):
            return product, residual
    return None


def _norm(node: Any) -> tuple[Node, Node, float] | None:
    """(h, weight, eps) where the node is weight * (h / root mean square of h, in float32, rounded to bfloat16).

    The weight is the model's own: in a CUDA graph products read it before the kernel in front of them has ended.
    """
    for weight, rounded in _operands(node, aten.mul.Tensor):
        for wide, scale in _operands(_converted(rounded, torch.bfloat16), aten.mul.Tensor):
            h, eps = _root_mean_square(scale)
            if h is None or _converted(wide, torch.float32) is not h or not _is_given(weight):
                continue
            if _alike(node, h, node.meta["val"].shape) and _alike(node, weight, h.meta["val"].shape[-1:]):
                return h, weight, eps
    return None


def _root_mean_square(node: Any) -> tuple[Any, float]:
    """(h, eps) where the node is 1 / sqrt(mean of h's squares + eps), in float32 along the last dimension, or (None, 0)."""
    for mean, eps in _operands(_argument(node, aten.rsqrt.default), aten.add.Tensor):
        square = _argument(mean, aten.mean.dim)
        h = _converted(_argument(square, aten.pow.Tensor_Scalar), torch.float32)
        if h is None or square.args[1] != 2 or not isinstance(eps, float):
            continue
        if list(mean.args[1]) in ([-1], [h.meta["val"].dim() - 1]) and mean.args[2:] == (True,):
            return h, eps
    return None, 0.0


def _only_multiplied(node: Node, products: list[Node]) -> bool:
    """Whether all that reads a value, also through views, are products that multiply it.

    Else it is computed anyway, and a product that computed it again would gain nothing.
    """
    for user in node.users:
        if _is_view(user):
            if not _only_multiplied(user, products):
                return False
            continue
        # One that has a norm multiplies something else than what it reads.
        if user not in products or _arguments(user).get("norm_weight") is not None:
            return False
        if any(value is node for name, value in _arguments(user).items() if name != "x"):
            return False
    return True


def _fuse_residual(total: Node, product: Node, residual: Node) -> Node:
    """The product with its residual, at the place of their sum."""
    shape = product.meta["val"].shape
    with total.graph.inserting_before(total):
        fused = _fused(product, residual=_reshaped(residual, shape))
        total.replace_all_uses_with(_reshaped(fused, total.meta["val"].shape))
    _erase_unused(total)
    return fused


def _fuse_norm(product: Node, h: Node, weight: Node, eps: float) -> Node:
    """The product of the norm of h."""
    x = _arguments(product)["x"]
    with product.graph.inserting_before(product):
        fused = _fused(product, x=_reshaped(h, x.meta["val"].shape), norm_weight=weight, norm_eps=eps)
    product.replace_all_uses_with(fused)
    _erase_unused(product)
    return fused


def _fused(product: Node, **changes: Any) -> Node:
    """A node like product's with other arguments."""
    fused = torch.ops.nf4.fused_linear.default
    given = _arguments(product) | changes
    args = tuple(given.get(argument.name, argument.default_value) for argument in fused._schema.arguments)
    node = product.graph.call_function(fused, args)
    node.meta["val"] = product.meta["val"]
    # Without these inductor may give an operation its arguments in any layout.
    node.meta["eager_input_vals"] = (torch.fx.node.map_arg(args, lambda arg: arg.meta["val"]), {})
    return node


def _reshaped(node: Node, shape: torch.Size) -> Node:
    if node.meta["val"].shape == shape:
        return node
    reshaped = node.graph.call_function(aten.reshape.default, (node, list(shape)))
    reshaped.meta["val"] = node.meta["val"].reshape(shape)
    return reshaped


def _erase_unused(node: Node) -> None:
    """Erase a node that nothing reads any more, and the nodes that only it has read."""
    # Two ways may lead to one: the norm reads its input twice.
    if node.op == "call_function" and not node.users and not node._erased:
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        for source in inputs:
            _erase_unused(source)


def _operands(node: Any, target: Any) -> Iterator[tuple[Any, Any]]:
    """The two operands of a node that calls target, in either order; none of other nodes."""
    if isinstance(node, Node) and node.target is target and not node.kwargs:
        yield node.args[0], node.args[1]
        yield node.args[1], node.args[0]


def _argument(node: Any, target: Any) -> Any:
    """The first argument of a node that calls target; None of other nodes."""
    return node.args[0] if isinstance(node, Node) and node.target is target and not node.kwargs else None


def _converted(node: Any, dtype: torch.dtype) -> Any:
    """What a node converts to dtype; None where it does something else."""
    source = _argument(node, prims.convert_element_type.default)
    return source if source is not None and node.args[1] == dtype else None


def _is_given(node: Any) -> bool:
    """Whether a node is computed by none of the graph's operations."""
    return isinstance(node, Node) and node.op in ("placeholder", "get_attr")


def _is_view(node: Any) -> bool:
    """Whether a node is a view with the same last dimension."""
    if not isinstance(node, Node) or node.target not in _VIEWS:
        return False
    source: Any = node.args[0]
    return bool(node.meta["val"].shape[-1:] == source.meta["val"].shape[-1:])


def _alike(node: Node, other: Node, shape: torch.Size) -> bool:
    """Whether other is contiguous, of that shape, and of node's dtype and device."""
    value, given = node.meta["val"], other.meta["val"]
    same = (given.shape, given.dtype, given.device) == (shape, value.dtype, value.device)
    return same and bool(given.is_contiguous())
