"""The pass that lets sums over the ranks add residuals: where it does, and that the result is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._inductor import config
from torch.fx import Graph

from server.engine.runtime import exchange
from server.engine.runtime.compile.passes.fusion import FusedOperations
from tests.engine.compile.fusing import passes_only

WIDTH, TOKENS = 64, 3
BYTES = WIDTH * TOKENS * 4
Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A group of one process: what it exchanges stays as it is."""
    exchange.join(exchange.Membership(0, 1, str(tmp_path / "store")), torch.device("cpu"))
    yield
    exchange.leave()


def layer(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> Pair:
    """What a decoder layer does behind o and down."""
    y = torch.nn.functional.linear(x, weight)
    torch.ops.nf4_server_exchange.all_reduce(y)
    h = residual + y
    return torch.nn.functional.rms_norm(h, (WIDTH,)), h


def experts(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> Pair:
    """What a layer does behind experts, which give a row for each token."""
    y = torch.nn.functional.linear(x.view(TOKENS, WIDTH), weight)
    torch.ops.nf4_server_exchange.all_reduce(y)
    h = residual + y.reshape(1, TOKENS, WIDTH)
    return torch.nn.functional.rms_norm(h, (WIDTH,)), h


def shared_experts(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> Pair:
    """What a layer does behind experts and shared experts whose sum has been reshaped."""
    y = torch.nn.functional.linear(x.view(TOKENS, WIDTH), weight)
    y = (y + y.sigmoid()).reshape(1, TOKENS, WIDTH)
    torch.ops.nf4_server_exchange.all_reduce(y)
    h = residual + y
    return torch.nn.functional.rms_norm(h, (WIDTH,)), h


def read_twice(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> Pair:
    y = torch.nn.functional.linear(x, weight)
    torch.ops.nf4_server_exchange.all_reduce(y)
    return residual + y, y * 2


def broadcast(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> Pair:
    y = torch.nn.functional.linear(x, weight)
    torch.ops.nf4_server_exchange.all_reduce(y)
    return y + residual[:, :1], y.new_zeros(1)


def exchanges(function: Callable[..., Pair], most_bytes: int, dynamic: bool, backend: Any) -> list[str]:
    """The names of the exchanges in the function's graph, once it has given what it gives without being compiled."""
    found: list[str] = []

    def look(graph: Graph) -> None:
        calls = [node for node in graph.nodes if node.target is auto_functionalized_v2]
        found.extend(call.args[0]._schema.name.split("::")[1] for call in calls)

    generator = torch.Generator().manual_seed(0)
    sizes = (1, TOKENS, WIDTH), (WIDTH, WIDTH), (1, TOKENS, WIDTH)
    x, weight, residual = (torch.randn(size, generator=generator) for size in sizes)
    kept = residual.clone()
    torch._dynamo.reset()
    hooks = {
        "post_grad_custom_pre_pass": FusedOperations(exchanged_bytes=most_bytes),
        "post_grad_custom_post_pass": look,
        "force_disable_caches": True,
    }
    with config.patch(hooks), torch.inference_mode():
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
        for got, expected in zip(compiled(x, weight, residual), function(x, weight, residual), strict=True):
            torch.testing.assert_close(got, expected)
    assert torch.equal(residual, kept)
    return found


@pytest.mark.parametrize("function", [layer, experts, shared_experts])
def test_an_exchange_adds_the_residual(function: Callable[..., Pair]) -> None:
    assert exchanges(function, BYTES, False, passes_only) == ["all_reduce_add"]


@pytest.mark.parametrize(
    ("function", "most_bytes", "dynamic"),
    [
        (layer, BYTES - 1, False),
        (layer, 0, False),
        (layer, BYTES, True),
        (read_twice, BYTES, False),
        (broadcast, BYTES, False),
    ],
)
def test_others_stay_as_they_are(function: Callable[..., Pair], most_bytes: int, dynamic: bool) -> None:
    assert exchanges(function, most_bytes, dynamic, passes_only) == ["all_reduce"]


@pytest.mark.slow
def test_code_that_inductor_generates() -> None:
    assert exchanges(layer, BYTES, False, "inductor") == ["all_reduce_add"]
