"""The pass over inductor's graphs that puts fused launches in the places of small operations beside GEMMs and attention.

torch.compile makes a kernel of each residual sum with the norm behind it. Where nf4_kernels has a fused launch, a GEMM
does both (norms.py); GEMMs of gates and ups compute the gated activation (gates.py), attention the rotary embedding
(rotary.py), the launch in front of a GEMM may write its input tiled (tiled_inputs.py), sums over ranks add the residual
(exchanges.py), and a router of experts is one launch (routers.py), or selects in one (selection.py).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.fx import Graph, Node

from nf4_kernels import cuda, ops
from nf4_kernels.cuda.routing import can_route, can_route_linear
from nf4_kernels.cuda.top_k import can_select
from server.engine.runtime.compile.passes.exchanges import fuse_exchanged_residuals
from server.engine.runtime.compile.passes.gates import fuse_gates
from server.engine.runtime.compile.passes.matching import HasLaunch, bound_arguments_of, gemm_of, untouched
from server.engine.runtime.compile.passes.norms import fuse_norms, fuse_residuals
from server.engine.runtime.compile.passes.rotary import fuse_rotary
from server.engine.runtime.compile.passes.routers import Joins, fuse_routers
from server.engine.runtime.compile.passes.selection import Selects, fuse_selections
from server.engine.runtime.compile.passes.tiled_inputs import TileOf, fuse_tiled_inputs
from server.engine.runtime.exchange import one_launch
from server.engine.runtime.sources import code_digest


@contextmanager
def fused_operations(applies_rotary: bool = False) -> Iterator[None]:
    """Run the pass on what inductor compiles while this is entered, unless another pass is installed already.

    applies_rotary: whether the attention computes queries' and keys' norms and rotary embeddings.
    """
    # Takes a second and more to import, and only those who compile need it.
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    if config.post_grad_custom_pre_pass:
        yield
        return
    # Inductor calls uuid(), without which it keeps no code on disk, only for subclasses of CustomGraphPass.
    CustomGraphPass.register(FusedOperations)
    with config.patch(post_grad_custom_pre_pass=FusedOperations(applies_rotary=applies_rotary)):
        yield


def name_of_passes(applies_rotary: bool) -> bytes | None:
    """What names code that fused_operations() would have a part in; None where it leaves that to another pass."""
    from torch._inductor import config

    return None if config.post_grad_custom_pre_pass else FusedOperations(applies_rotary=applies_rotary).uuid()


class FusedOperations:
    """The pass, as inductor's post_grad_custom_pre_pass.

    Inductor's graphs are functional: operations that write in place have been replaced by ones that give a new tensor,
    and inputs are written by copies at the graph's end. So a value may be read later than it was before: by a GEMM at
    the place of the residual sum or of the gated activation, or by a GEMM instead of a norm. Only nodes in front of the
    first one that does write are touched. (Inductor writes in place again after this pass, and sees its nodes.)
    """

    def __init__(
        self,
        fuses: HasLaunch | None = None,
        applies_rotary: bool = False,
        tile_of: TileOf | None = None,
        gates: HasLaunch | None = None,
        exchanged_bytes: int | None = None,
        selects: Selects | None = None,
        routes: Selects | None = None,
        joins: Joins | None = None,
    ) -> None:
        """fuses, tile_of, gates: ops.can_fuse(), ops.token_tile(), ops.can_gate() if None. See fused_operations().

        selects, routes, joins: top_k.can_select(), routing.can_route() and routing.can_route_linear() if None.
        exchanged_bytes: up to which exchanges add residuals; exchange.one_launch() if None.
        """
        self._fuses = fuses
        self._applies_rotary = applies_rotary
        self._tile_of = tile_of
        self._gates = gates
        self._selects = selects
        self._routes = routes
        self._joins = joins
        self._exchanged_bytes = one_launch() if exchanged_bytes is None else exchanged_bytes

    def uuid(self) -> bytes | None:
        """The name of what the pass does, for kept code; None where something else than nf4_kernels decides that."""
        given = (self._fuses, self._tile_of, self._gates, self._selects, self._routes, self._joins)
        own = all(one is None for one in given)
        return _identity() + repr((self._applies_rotary, self._exchanged_bytes)).encode() if own else None

    def __call__(self, graph: Graph) -> None:
        """Rewrite the graph in place."""
        fuse_exchanged_residuals(untouched(graph), self._exchanged_bytes)
        fuse_routers(untouched(graph), self._routes or can_route, self._joins or can_route_linear)
        fuse_selections(untouched(graph), self._selects or can_select)
        nodes = untouched(graph)
        gemms = [node for node in nodes if node.target is torch.ops.nf4.linear.default and self._fits(node, False)]
        fuse_residuals(nodes, gemms)
        fuse_norms(gemms, lambda gemm: self._fits(gemm, True))
        fuse_gates(nodes, gemms, self._gates or ops.can_gate)
        if self._applies_rotary:
            fuse_rotary(nodes)
        fuse_tiled_inputs(gemms, self._tile_of or ops.token_tile)

    def _fits(self, gemm: Node, normalised: bool) -> bool:
        """Whether there is a fused launch for the GEMM."""
        given = bound_arguments_of(gemm)
        x, shape = given["x"].meta["val"], given["shape"]
        # In float16 the norm's input times the weight, which the launch computes first, may be too large.
        # Sizes that vary are not ints.
        if x.dtype != torch.bfloat16 or not all(isinstance(size, int) for size in (*x.shape, *shape)):
            return False
        fuses = self._fuses or ops.can_fuse
        return x.is_contiguous() and fuses(*gemm_of(gemm), normalised)


@functools.cache
def _identity() -> bytes:
    """A digest of everything that decides what the pass does, but for the GPU, which inductor's own key has."""
    return hashlib.sha256(repr((cuda.load_error(), code_digest())).encode()).digest()
