"""Layers with a dense part and a mixture of experts next to each other (Gemma 4), against transformers' own."""

from __future__ import annotations

import pytest
import torch

from server.engine.runtime.layers.experts import ModuleRouter
from server.engine.runtime.layers.parallel_experts import ParallelExperts, ScaledRouter, _read_router
from server.engine.runtime.preparation import written_layers
from tests.engine.layers.test_written_layers import paged_of

MIXTURE = {
    "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2,
    "moe_intermediate_size": 64,
}  # fmt: skip


def randomise(paged: object) -> None:
    torch.manual_seed(0)
    for layer in paged.model.get_decoder().layers:
        layer.router.proj.weight.normal_(0, 0.3)
        layer.router.scale.uniform_(0.5, 2)
        layer.router.per_expert_scale.uniform_(0.5, 2)
        for name in ("gate_up_proj", "down_proj"):
            getattr(layer.experts, name).normal_(0, 0.1)


@torch.inference_mode()
def test_layers_of_gemma_4_with_experts() -> None:
    paged, options = paged_of("gemma4_text", **MIXTURE)
    randomise(paged)
    written = written_layers.write_layers(paged, options)
    assert [type(layer.mlp) for layer in written] == [ParallelExperts] * len(options)
    assert [type(layer.mlp.router) for layer in written] == [ScaledRouter] * len(options)


@pytest.mark.parametrize("name", ["scale", "per_expert_scale"])
@torch.inference_mode()
def test_a_router_that_computes_something_else_keeps_its_own_code(name: str) -> None:
    paged, _ = paged_of("gemma4_text", **MIXTURE)
    randomise(paged)
    router = paged.model.get_decoder().layers[0].router
    assert type(_read_router(router)) is ScaledRouter
    own = router.forward

    def other(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parameter = getattr(router, name)
        kept = parameter.clone()
        parameter.copy_(1 / kept)
        try:
            return own(x)
        finally:
            parameter.copy_(kept)

    router.forward = other
    assert type(_read_router(router)) is ModuleRouter
