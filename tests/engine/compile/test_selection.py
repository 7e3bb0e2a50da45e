"""Routers of experts that are nf4::route, or select by nf4::top_k: where they do, where not, and the same choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch.fx import Graph
from transformers import MixtralConfig, OlmoeConfig, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import nf4_kernels.cuda.top_k
from server.engine.runtime.compile.passes.fusion import FusedOperations
from tests.engine.compile.fusing import compiled

pytestmark = pytest.mark.filterwarnings("error:erase_node")


def router(logits: torch.Tensor) -> Any:
    """A router like Qwen3-MoE's."""
    values, chosen = torch.topk(torch.softmax(logits.float(), -1), 3, dim=-1)
    return (values / values.sum(-1, keepdim=True)).to(logits.dtype), chosen.to(torch.int32)


def as_they_are(logits: torch.Tensor) -> Any:
    """A router whose results are read in the types that they have."""
    values, chosen = torch.topk(torch.softmax(logits, -1, dtype=torch.float), 3, dim=-1)
    return values.to(logits.dtype), chosen


def read_twice(logits: torch.Tensor) -> Any:
    """Something else reads values that the launch has not."""
    values, chosen = torch.topk(torch.softmax(logits, -1, dtype=torch.float), 3, dim=-1)
    return values / values.sum(dim=-1, keepdim=True), chosen, values * 2


def probabilities(logits: torch.Tensor) -> Any:
    """The probabilities are read: no router's launch."""
    p = torch.softmax(logits, -1, dtype=torch.float)
    return (*torch.topk(p, 3, dim=-1), p.sum(0))


def of_logits(logits: torch.Tensor) -> Any:
    """As gpt-oss': no softmax in front."""
    values, chosen = torch.topk(logits, 3, dim=-1)
    return torch.softmax(values, -1), chosen


def smallest(logits: torch.Tensor) -> Any:
    return torch.topk(logits, 3, largest=False)


def of_columns(logits: torch.Tensor) -> Any:
    return torch.topk(logits, 3, dim=0)


def too_wide(logits: torch.Tensor) -> Any:
    return torch.topk(logits.repeat(1, 60), 3)


def fused(function: Callable[..., Any], logits: torch.Tensor, joins: bool = False) -> tuple[Any, dict[str, int]]:
    """What the compiled function gives, and how many of its topk and of each launch there are."""
    found: dict[str, int] = {}

    def count(graph: Graph) -> None:
        targets = [node.target for node in graph.nodes]
        found["route"] = targets.count(torch.ops.nf4.route.default)
        found["route_linear"] = targets.count(torch.ops.nf4.route_linear.default)
        found["top_k"] = targets.count(torch.ops.nf4.top_k.default)
        found["topk"] = targets.count(torch.ops.aten.topk.default)
        found["operations"] = sum(node.op == "call_function" for node in graph.nodes)
        names = ("mm", "permute", "view", "reshape")
        found["linear"] = sum(str(target).startswith(tuple(f"aten.{name}." for name in names)) for target in targets)

    def fits(device: torch.device, dtype: torch.dtype, width: int, k: int) -> bool:
        return k <= width <= nf4_kernels.cuda.top_k.MOST_WIDTH

    hooks = {
        "post_grad_custom_pre_pass": FusedOperations(selects=fits, routes=fits, joins=lambda *_: joins),
        "post_grad_custom_post_pass": count,
        "force_disable_caches": True,
    }
    torch._dynamo.reset()
    with config.patch(hooks), torch.inference_mode():
        result = compiled(function)(logits)
    return result, found


def random_logits(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(7, 20, generator=torch.Generator().manual_seed(0)).to(dtype)


def check_results(function: Callable[..., Any], logits: torch.Tensor, results: Any) -> None:
    for found, wanted in zip(results, function(logits), strict=True):
        assert found.dtype == wanted.dtype
        # Weights may be rounded to the next bfloat16.
        torch.testing.assert_close(found, wanted, rtol=2**-7 if found.is_floating_point() else 0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [router, as_they_are, read_twice], ids=lambda f: f.__name__)
def test_routers_are_one_launch(function: Callable[..., Any], dtype: torch.dtype) -> None:
    logits = random_logits(dtype)
    results, found = fused(function, logits)
    assert (found["route"], found["top_k"], found["topk"]) == (1, 0, 0)
    check_results(function, logits, results)


@pytest.mark.parametrize("normalised", [True, False], ids=["normalised", "plain"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Qwen3MoeTopKRouter, Qwen3MoeConfig),
        (Qwen2MoeTopKRouter, Qwen2MoeConfig),
        (OlmoeTopKRouter, OlmoeConfig),
        (MixtralTopKRouter, MixtralConfig),
    ],
    ids=lambda given: given.__name__,
)
def test_of_families_nothing_is_left_beside_the_launch(
    kind: type[nn.Module], settings: type[PreTrainedConfig], normalised: bool
) -> None:
    sizes = {"num_experts": 20, "num_local_experts": 20, "num_experts_per_tok": 3, "hidden_size": 64}
    torch.manual_seed(0)
    gate = kind(settings(**sizes, norm_topk_prob=normalised)).bfloat16()
    nn.init.normal_(gate.weight)

    def routes(x: torch.Tensor) -> Any:
        """The router with what the experts do to its results (NF4Experts)."""
        _, weights, experts = gate(x)
        return weights.float(), experts.to(torch.int32)

    x = torch.randn(7, 64).bfloat16()
    for joins in (False, True):
        results, found = fused(routes, x, joins)
        assert (found["route"], found["route_linear"]) == (1 - joins, joins)
        assert found["linear"] == 2 * (1 - joins)  # the weight's transpose and the GEMM
        assert found["operations"] == found["linear"] + 3  # the launch and its two results
        check_results(routes, x, results)


def test_logits_that_are_read_are_computed_by_their_gemm() -> None:
    weight = torch.randn(20, 64)

    def function(x: torch.Tensor) -> Any:
        logits = x @ weight.t()
        return (*router(logits), logits * 2)

    torch.manual_seed(0)
    x = torch.randn(7, 64)
    results, found = fused(function, x, joins=True)
    assert (found["route"], found["route_linear"]) == (1, 0)
    check_results(function, x, results)


@pytest.mark.parametrize(
    ("function", "replaced"),
    [(probabilities, 1), (of_logits, 1), (smallest, 0), (of_columns, 0), (too_wide, 0)],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_others_select_in_one_launch_or_as_torch_does(function: Callable[..., Any], replaced: int) -> None:
    logits = random_logits(torch.float32)
    results, found = fused(function, logits)
    assert (found["route"], found["top_k"], found["topk"]) == (0, replaced, 1 - replaced)
    check_results(function, logits, results)
