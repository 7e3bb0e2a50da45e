"""Down of a mixture that reads its experts while launches in front still run: follows_gated of moe_linear()."""

from __future__ import annotations

import itertools

import pytest
import torch

from nf4_kernels.cuda import moe as cuda_moe
from nf4_kernels.cuda import routing
from nf4_kernels.plan.moe import MoePlan, moe_candidates
from tests.nf4_kernels.cuda.cuda_weights import DEVICE, gpu
from tests.nf4_kernels.cuda.test_moe_cuda import device, random_experts

EXPERTS, TOP_K, HIDDEN, INNER, LAYERS = 24, 4, 2048, 768, 4


def plans(tokens: int, gated: bool) -> list[MoePlan]:
    """Every launch of one of a layer's two GEMMs."""
    n, k = (2 * INNER, HIDDEN) if gated else (HIDDEN, INNER)
    arch, processors = device()
    return moe_candidates(tokens, TOP_K, EXPERTS, n, k, arch, processors, True, gated, not gated)


@gpu
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 40, 130])
def test_each_layer_sees_the_experts_that_it_has_chosen(tokens: int) -> None:
    weights = random_experts(EXPERTS, 2 * INNER, HIDDEN), random_experts(EXPERTS, HIDDEN, INNER)
    x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16) / HIDDEN**0.5
    assert routing.can_route(x.device, torch.float32, EXPERTS, TOP_K)
    logits = torch.empty(LAYERS, tokens, EXPERTS, device=DEVICE)

    def layers(gate: MoePlan, down: MoePlan, follows: bool) -> list[torch.Tensor]:
        found = []
        for layer in range(LAYERS):
            # The routes of each layer lie where those of the layer before did, as in a graph of a model.
            weighting, experts = routing.route(logits[layer], TOP_K, True, torch.float32)
            inner = cuda_moe.run(x, weights[0], experts, None, None, "silu", gate)
            found.append(cuda_moe.run(inner, weights[1], experts, None, weighting, None, down, follows))
            del weighting, experts, inner
        return found

    for gate, down in itertools.product(plans(tokens, True), plans(tokens, False)):
        logits.normal_()
        layers(gate, down, True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layers(gate, down, True)
        for _ in range(5):
            logits.normal_()
            expected = layers(gate, down, False)
            for value in out:
                value.fill_(float("nan"))
            graph.replay()
            for layer, (a, b) in enumerate(zip(out, expected, strict=True)):
                assert torch.equal(a, b), f"layer {layer}, {int((a != b).sum())} of {a.numel()} differ: {gate}; {down}"
