"""GEMMs of mixtures of experts on CUDA: every launch that a device can do against a float64 oracle."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from nf4_kernels import Weight, reference
from nf4_kernels.cuda import moe as cuda_moe
from nf4_kernels.cuda.device import arch
from nf4_kernels.params import EXPERT_ACTIVATIONS
from nf4_kernels.plan.moe import MoePlan, moe_candidates
from nf4_kernels.plan.moe_rows import MOE_BOXED, MoeRows, copies_boxes
from tests.nf4_kernels.cuda.cuda_weights import DEVICE, HOPPER, gpu, random_weight, relative_error

Maybe = torch.Tensor | None
# (experts, rows of one, k): few and many experts, k of an odd number of 64s, rows in no whole tile, k in several parts, k of
# moe_rows' boxes, and each number of moe_warps' steps, whole and not.
SHAPES = [
    *((1, 48, 64), (3, 40, 192), (128, 96, 320), (8, 2880, 2880), (64, 256, 768)),
    *((16, 200, 1792), (128, 2048, 256), (4, 300, 7168), (2, 64, 14336)),
    *((24, 202, 2048), (5, 88, 4096), (30, 90, 768), (12, 72, 512), (20, 120, 1024), (128, 88, 704), (9, 50, 960)),
]
# bfloat16 and float16, as in cuda_weights; results that are summed up by routing weights may be rounded once more.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


def device() -> tuple[int, int]:
    """Compute capability (10 * major + minor) and multiprocessors."""
    return arch(DEVICE), torch.cuda.get_device_properties(DEVICE).multi_processor_count


def random_experts(
    experts: int, n: int, k: int, blocksize: int = 64, nested: bool = True, offsets: bool = False
) -> Weight:
    flat = random_weight(experts * n, k, blocksize, nested, offsets).weight
    return dataclasses.replace(flat, shape=(experts, n, k))


def activated(activation: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if activation == "silu":
        return functional.silu(gate) * up
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def exact(
    x: torch.Tensor, weight: Weight, experts: torch.Tensor, bias: Maybe, routing: Maybe, activation: str | None
) -> torch.Tensor:
    """The result in float64."""
    (count, n, k), (tokens, top_k) = weight.shape, experts.shape
    dense = reference.dequantize(weight, torch.float32)
    rows = (x if x.ndim == 3 else x[:, None].expand(tokens, top_k, k)).double()
    out = torch.zeros(tokens, top_k, n, dtype=torch.float64, device=x.device)
    for expert in range(count):
        chosen = experts == expert
        out[chosen] = rows[chosen] @ dense[expert].double().t()
        if bias is not None:
            out[chosen] += bias[expert].double()
    if activation is not None:
        out = activated(activation, *out.chunk(2, -1))
    out *= ((experts >= 0) & (experts < count))[..., None]
    return out if routing is None else (out * routing[..., None].double()).sum(1)


def random_choices(tokens: int, top_k: int, experts: int, kind: str = "distinct") -> torch.Tensor:
    """int32 [tokens, top_k]. distinct: as a router chooses; one: all the same; unknown: some are no experts."""
    if kind == "one":
        return torch.full((tokens, top_k), experts - 1, dtype=torch.int32, device=DEVICE)
    if kind == "unknown":
        return torch.randint(-2, experts + 2, (tokens, top_k), dtype=torch.int32, device=DEVICE)
    return torch.rand(tokens, experts, device=DEVICE).topk(top_k, 1).indices.int()


def poisoned(call: Callable[[], torch.Tensor], *sizes: int) -> torch.Tensor:
    """Result of call() if the memory that it allocates holds NaN."""
    for size in sizes:
        torch.full((size // 2 + 1,), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    return call()


def check(
    weight: Weight,
    tokens: int,
    experts: torch.Tensor,
    gated: bool,
    dtype: torch.dtype = torch.bfloat16,
    per_choice: bool = False,
    plans: list[MoePlan] | None = None,
    with_bias: bool = True,
    activation: str = "silu",
) -> None:
    """Every launch's results are right, the same bits each time, and wherever the output's memory was."""
    (count, n, k), top_k = weight.shape, experts.shape[1]
    x = torch.randn((tokens, top_k, k) if per_choice else (tokens, k), device=DEVICE).to(dtype) / k**0.5
    bias = torch.randn(count, n, device=DEVICE).to(dtype) if with_bias else None
    routing = None if gated or not with_bias else torch.rand(tokens, top_k, device=DEVICE)
    name = activation if gated else None
    wanted = exact(x, weight, experts, bias, routing, name)
    if routing is not None:
        # The weight of a choice whose expert does not exist counts for nothing.
        routing[(experts < 0) | (experts >= count)] = torch.nan
    if plans is None:
        nested = weight.absmax_8bit is not None
        routed = routing is not None
        plans = moe_candidates(tokens, top_k, count, n, k, *device(), nested, gated, routed, weight.blocksize)
    # Rounding the weights to bfloat16 alone gives one in a thousand results of 40 values an error of 0.0067 and more. Where
    # all choices of a token are the same expert, so are their values.
    tolerance = TOLERANCE[dtype] * (2 if wanted.unique().numel() < 256 else 1)
    for plan in plans:
        sizes = (
            wanted.numel() * 2,
            plan.workspace_bytes(experts.numel(), experts.numel(), count, n, k, routing is not None),
        )

        def once(plan: MoePlan = plan) -> torch.Tensor:
            return cuda_moe.run(x, weight, experts, bias, routing, name, plan)

        found = poisoned(once, *sizes)
        assert found.dtype == dtype
        assert found.shape == wanted.shape
        if wanted.any():
            assert relative_error(found, wanted) < tolerance, str(plan)
        assert torch.equal(found[wanted == 0], wanted[wanted == 0].to(dtype)), str(plan)
        assert torch.equal(found, poisoned(once, *sizes)), str(plan)


@gpu
@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results(shape: tuple[int, int, int], gated: bool) -> None:
    experts, n, k = shape
    weight = random_experts(experts, n, k)
    for tokens, per_choice in zip((1, 2, 5, 8, 33, 130), itertools.cycle((False, True))):
        top_k = min(experts, 4)
        check(weight, tokens, random_choices(tokens, top_k, experts), gated, per_choice=per_choice)


@gpu
@pytest.mark.parametrize("kind", ["one", "unknown"])
def test_choices_that_no_router_makes(kind: str) -> None:
    weight = random_experts(5, 80, 256)
    for tokens in (1, 3, 40, 300):
        for gated in (False, True):
            check(weight, tokens, random_choices(tokens, 3, 5, kind), gated)


@gpu
def test_no_choice_is_known() -> None:
    weight = random_experts(3, 64, 128)
    check(weight, 4, torch.full((4, 2), 3, dtype=torch.int32, device=DEVICE), False)
    check(weight, 4, torch.full((4, 2), -1, dtype=torch.int32, device=DEVICE), True)


@gpu
@pytest.mark.parametrize("blocksize", [64, 128, 512])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
def test_scales(nested: bool, blocksize: int) -> None:
    for n, k in ((64, 512), (40, 320)):
        weight = random_experts(6, n, k, blocksize, nested, offsets=nested and blocksize == 64)
        for tokens in (1, 20):
            for gated in (False, True):
                check(weight, tokens, random_choices(tokens, 2, 6), gated, with_bias=False)


@gpu
@HOPPER
@pytest.mark.parametrize("k", sorted({warps // teams * blocks * 64 for warps, teams, blocks, _ in MOE_BOXED}))
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
def test_boxes(k: int, nested: bool) -> None:
    """Experts that nobody chose, rows in no whole unit or box, one and many groups an expert, choices that are added up."""
    processors = device()[1]
    for experts, n, top_k in ((7, 202, 3), (40, 88, 8), (2, 24, 1), (128, 16, 4)):
        weight = random_experts(experts, n, k, 64, nested, offsets=nested)
        for tokens, gated in itertools.product((1, 2, 9, 33, 120), (True, False)):
            every = moe_candidates(tokens, top_k, experts, n, k, 90, processors, nested, gated, not gated)
            plans = [plan for plan in every if isinstance(plan, MoeRows) and copies_boxes(plan, k, 90, 64)]
            assert plans
            for kind in ("distinct", "unknown"):
                dtype = torch.float16 if tokens == 9 else torch.bfloat16
                choices = random_choices(tokens, top_k, experts, kind)
                check(weight, tokens, choices, gated, dtype, per_choice=tokens % 2 == 0, plans=plans)


@gpu
@pytest.mark.parametrize("activation", list(EXPERT_ACTIVATIONS))
def test_activations(activation: str) -> None:
    weight = random_experts(4, 128, 512, nested=False)
    for tokens in (1, 64):
        check(weight, tokens, random_choices(tokens, 2, 4), True, activation=activation)


@gpu
def test_float16() -> None:
    for n, k in ((192, 512), (56, 2048), (40, 768)):
        weight = random_experts(16, n, k)
        for tokens, gated in itertools.product((1, 9, 100), (False, True)):
            check(weight, tokens, random_choices(tokens, 4, 16), gated, torch.float16)


@gpu
def test_listed_groups_are_those_of_thread_blocks() -> None:
    weight = random_experts(32, 96, 512)
    experts = random_choices(50, 4, 32, "unknown")
    plans: list[MoePlan] = []
    for plan in moe_candidates(50, 4, 32, 96, 512, *device(), True, False):
        if isinstance(plan, MoeRows):
            assert not plan.sorted
            plans += [plan, dataclasses.replace(plan, sorted=True)]
    check(weight, 50, experts, False, plans=plans)


@gpu
def test_in_a_graph_choices_may_change() -> None:
    weight = random_experts(16, 128, 512)
    x = torch.randn(24, 512, device=DEVICE, dtype=torch.bfloat16)
    experts = random_choices(24, 4, 16)
    routing = torch.rand(24, 4, device=DEVICE)

    def call() -> torch.Tensor:
        return cuda_moe.run(x, weight, experts, None, routing, None)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for kind in ("distinct", "one", "unknown"):
        experts.copy_(random_choices(24, 4, 16, kind))
        graph.replay()
        assert relative_error(out, exact(x, weight, experts, None, routing, None)) < TOLERANCE[torch.bfloat16]


@gpu
def test_bad_weights_are_named() -> None:
    weight = random_experts(4, 64, 128)
    x, experts = torch.randn(3, 128, device=DEVICE, dtype=torch.bfloat16), random_choices(3, 2, 4)
    short = dataclasses.replace(weight, absmax_8bit=torch.zeros(3, device=DEVICE, dtype=torch.uint8))
    moved = dataclasses.replace(weight, packed=torch.nn.functional.pad(weight.packed.flatten(), (1, 0))[1:])
    for bad, match in ((short, "absmax_8bit has"), (moved, "packed must begin at a multiple of 16 bytes")):
        with pytest.raises(ValueError, match=match):
            cuda_moe.run(x, bad, experts, None, None, None)


def test_they_are_for_gpus_alone() -> None:
    x = torch.empty(1, 2048, dtype=torch.bfloat16, device="meta")
    assert not cuda_moe.takes(x, [128, 1536, 2048], 64, 8, True)


@gpu
def test_what_they_take() -> None:
    x = torch.empty(3, 2048, dtype=torch.bfloat16, device=DEVICE)
    assert cuda_moe.takes(x, [128, 1536, 2048], 64, 8, True)
    assert not cuda_moe.takes(x.float(), [128, 1536, 2048], 64, 8, True)
    assert not cuda_moe.takes(x, [128, 1536, 2048], 32, 8, True)
    assert not cuda_moe.takes(x[:, :100], [128, 1536, 100], 64, 8, True)
