"""Makes graphs with the pass of runtime/compile/passes/fusion.py, and counts what is in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch.fx import Graph, GraphModule
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from server.engine.runtime.attention.calls import ATTEND, ATTEND_ROTARY
from server.engine.runtime.compile.passes.fusion import FusedOperations
from server.engine.runtime.compile.passes.matching import HasLaunch, bound_arguments_of
from server.engine.runtime.compile.passes.tiled_inputs import TileOf
from server.engine.runtime.model.projections import NF4Linear

BF16 = torch.bfloat16


def always(*_: object) -> bool:
    return True


def sixteen(device: torch.device, dtype: torch.dtype, rows: int, shape: Sequence[int], *_: object) -> bool:
    """As ops.can_gate(), for all sizes that such a launch could have."""
    return shape[0] % 16 == 0


def count(graph: Graph) -> Counter[str]:
    """A graph's GEMMs by what their launches do beside, its norms, and its attention."""
    found: Counter[str] = Counter()
    for node in graph.nodes:
        if node.target is torch.ops.nf4.fused_linear.default:
            given = bound_arguments_of(node)
            residual, weight = given["residual"], given["norm_weight"]
            found[" ".join(["norm"] * (weight is not None) + ["residual"] * (residual is not None))] += 1
        if node.target is torch.ops.nf4.tiled_linear.default:
            found["tiled residual" if bound_arguments_of(node)["residual"] is not None else "tiled"] += 1
        if node.target is torch.ops.nf4.gated_linear.default:
            given = bound_arguments_of(node)
            weight, activation, tile = given["norm_weight"], given["activation"], given["tile"]
            found[" ".join(["norm"] * (weight is not None) + [activation] + ["tiled"] * (tile > 0))] += 1
        found["plain"] += node.target is torch.ops.nf4.linear.default
        found["attend"] += node.target is ATTEND
        found["rotary"] += node.target is ATTEND_ROTARY
        found["rsqrt"] += node.target is torch.ops.aten.rsqrt.default
    return +found


@contextmanager
def fusing(
    fuses: HasLaunch = always, applies_rotary: bool = False, tile_of: TileOf | None = None, gates: HasLaunch = sixteen
) -> Iterator[list[Counter[str]]]:
    """While entered, graphs are fused; gives what is in each of them."""
    found: list[Counter[str]] = []
    hooks = {
        "post_grad_custom_pre_pass": FusedOperations(fuses, applies_rotary, tile_of, gates),
        "post_grad_custom_post_pass": lambda graph: found.append(count(graph)),
        "force_disable_caches": True,
    }
    torch._dynamo.reset()
    with config.patch(hooks):
        yield found


def passes_only(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """inductor without its code generator, which takes seconds: graphs run as its passes leave them."""

    def inner(module: GraphModule, *_: object, **__: object) -> GraphModule:
        post_grad_passes(module, is_inference=True)
        return module

    compiled: Callable[..., Any] = compile_fx(module, inputs, inner_compile=inner)
    return compiled


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, **{"fullgraph": True, "dynamic": False, "backend": passes_only, **options})


def nf4(k: int, n: int, dtype: torch.dtype = BF16, weight: torch.Tensor | None = None) -> Linear4bit:
    layer = Linear4bit(k, n, bias=False, compute_dtype=dtype, quant_type="nf4")
    values = torch.randn(n, k) * 0.15 if weight is None else weight
    layer.weight = Params4bit(values.to(dtype), requires_grad=False, quant_type="nf4")
    moved: Linear4bit = layer.to("cpu")
    return moved


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Compare within a few roundings to bfloat16."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm()) < 0.02


class Around(nn.Module):
    """GEMMs with a norm and a residual around them, put together by function(self, h)."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.norm = LlamaRMSNorm(64, 0.3).to(BF16).requires_grad_(False)
        self.norm.weight.uniform_(0.5, 2)
        self.first, self.second = NF4Linear.of(nf4(64, 64)), NF4Linear.of(nf4(64, 64))

    def forward(self, h: torch.Tensor) -> Any:
        return self.function(self, h)
