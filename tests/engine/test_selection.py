"""Routers of experts that select by nf4::top_k: where they do, where not, and the same choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch.fx import Graph

import nf4_kernels.top_k
from server.engine.runtime.compile.passes.fusion import FusedOperations
from tests.engine.fusing import compiled

pytestmark = pytest.mark.filterwarnings("error:erase_node")


def router(logits: torch.Tensor) -> Any:
    """A router like Qwen3-MoE's."""
    values, chosen = torch.topk(torch.softmax(logits.float(), -1), 3, dim=-1)
    return (values / values.sum(-1, keepdim=True)).to(logits.dtype), chosen.to(torch.int32)


def smallest(logits: torch.Tensor) -> Any:
    return torch.topk(logits, 3, largest=False)


def of_columns(logits: torch.Tensor) -> Any:
    return torch.topk(logits, 3, dim=0)


def too_wide(logits: torch.Tensor) -> Any:
    return torch.topk(logits.repeat(1, 60), 3)


def selections(function: Callable[..., Any], logits: torch.Tensor) -> tuple[Any, int]:
    """What the compiled function gives, and how many of its topk are nf4::top_k."""
    found: list[int] = []

    def count(graph: Graph) -> None:
        found.append(sum(node.target is torch.ops.nf4.top_k.default for node in graph.nodes))
        assert all(node.target is not torch.ops.aten.topk.default for node in graph.nodes) or found[-1] == 0

    hooks = {
        "post_grad_custom_pre_pass": FusedOperations(
            selects=lambda device, dtype, width, k: k <= width <= nf4_kernels.top_k.MOST_WIDTH
        ),
        "post_grad_custom_post_pass": count,
        "force_disable_caches": True,
    }
    torch._dynamo.reset()
    with config.patch(hooks), torch.inference_mode():
        result = compiled(function)(logits)
    return result, sum(found)


@pytest.mark.parametrize(
    ("function", "replaced"),
    [(router, 1), (smallest, 0), (of_columns, 0), (too_wide, 0)],
    ids=["router", "smallest", "columns", "wide"],
)
def test_routers_select_in_one_launch(function: Callable[..., Any], replaced: int) -> None:
    logits = torch.randn(7, 20, generator=torch.Generator().manual_seed(0))
    (values, chosen), count = selections(function, logits)
    wanted_values, wanted = function(logits)
    assert count == replaced
    torch.testing.assert_close(values, wanted_values)
    assert torch.equal(chosen, wanted)
