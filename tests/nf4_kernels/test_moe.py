"""moe_linear() and moe_gated_linear() against float64 GEMMs of the expanded weights, expert by expert."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from nf4_kernels import cpu, moe, moe_torch, reference
from nf4_kernels.format import Weight
from tests.marks import with_rest
from tests.nf4_kernels.weights import FIXED_POINT, quantized, using_isa

FLOATS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# (experts, N, K, blocksize, nested)
WEIGHTS = [(4, 32, 64, 64, False), (8, 128, 256, 64, True), (5, 24, 80, 64, False), (3, 64, 192, 32, False)]


@dataclass(frozen=True)
class Experts:
    """A random weight of several experts, and what it is in float64."""

    weight: Weight
    exact: torch.Tensor
    bias: torch.Tensor | None


@pytest.fixture(params=cpu.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this CPU has, in turn."""
    if cpu.load_error() is not None:
        pytest.skip("no CPU kernels")
    with using_isa(request.param):
        yield request.param


def random_experts(
    count: int,
    n: int,
    k: int,
    blocksize: int,
    nested: bool,
    dtype: torch.dtype,
    bias: bool = False,
    offsets: bool = False,
) -> Experts:
    """offsets: every expert is quantized for itself, so that each group of scales has an offset of its own."""
    parts = [quantized((n, k), blocksize, nested, seed=7 * count + index).weight for index in range(count)]
    if offsets:
        joined = [
            torch.cat([getattr(p, name).reshape(-1) for p in parts]) for name in ("packed", "absmax", "absmax_8bit")
        ]
        offset = torch.cat([p.absmax_offset.reshape(1).expand(p.absmax.numel()) for p in parts])
        weight = Weight(joined[0], (count, n, k), joined[1], blocksize, joined[2], parts[0].absmax_code, offset)
    else:
        weight = quantized((count, n, k), blocksize, nested, seed=count).weight
    exact = reference.dequantize(weight, torch.float32).to(dtype).double()
    return Experts(weight, exact, torch.randn(count, n).to(dtype) if bias else None)


def exactly(e: Experts, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The choices' GEMMs in float64: [tokens, top_k, N]."""
    out = torch.zeros(*ids.shape, e.exact.shape[1], dtype=torch.float64)
    for token in range(ids.shape[0]):
        for choice, index in enumerate(ids[token].tolist()):
            if 0 <= index < len(e.exact):
                row = x[token] if x.dim() == 2 else x[token, choice]
                out[token, choice] = e.exact[index] @ row.double() + (0 if e.bias is None else e.bias[index].double())
    return out


def call(e: Experts, x: torch.Tensor, ids: torch.Tensor, routing: torch.Tensor | None = None) -> torch.Tensor:
    return moe.moe_linear(x, e.weight, ids, e.bias, routing)


def is_close(found: torch.Tensor, exact: torch.Tensor) -> bool:
    assert found.shape == exact.shape
    error = (found.double() - exact).norm() / exact.norm().clamp(min=1e-30)
    # Sums of experts may cancel, and in fixed point that shows.
    fixed = 2e-4 if cpu.isa() in FIXED_POINT else 0.0
    return bool(error < FLOATS[found.dtype] + fixed)


@pytest.mark.parametrize(
    ("tokens", "top_k", "per_choice"), [(1, 2, False), (3, 1, True), (37, 3, False), (37, 3, True)]
)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    with_rest(itertools.product(WEIGHTS, FLOATS), lambda kind: kind[0] is WEIGHTS[2] or kind[1] is torch.bfloat16),
)
def test_every_choice_gets_its_experts_gemm(
    shape: tuple[int, int, int, int, bool], dtype: torch.dtype, tokens: int, top_k: int, per_choice: bool
) -> None:
    e = random_experts(*shape, dtype, bias=tokens == 3)
    ids = torch.stack([torch.randperm(shape[0])[:top_k] for _ in range(tokens)]).to(torch.int32)
    x = torch.randn(*((tokens, top_k) if per_choice else (tokens,)), shape[2]).to(dtype)
    exact = exactly(e, x, ids)
    assert is_close(call(e, x, ids), exact)
    routing = torch.rand(tokens, top_k)
    assert is_close(call(e, x, ids, routing), (exact * routing.double().unsqueeze(-1)).sum(1))
    alone = moe_torch.moe_linear
    assert is_close(alone(x, e.weight, ids, e.bias, None), exact)
    assert is_close(alone(x, e.weight, ids, e.bias, routing), (exact * routing.double().unsqueeze(-1)).sum(1))


@pytest.mark.parametrize("tokens", [1, 5, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set_and_number_of_tokens(isa: str, tokens: int, dtype: torch.dtype) -> None:
    """Few tokens for an expert and many, experts that nobody has chosen, and sizes that are no multiples of tiles."""
    e = random_experts(6, 72, 192, 64, False, dtype, bias=True)
    ids = torch.stack([torch.randperm(4)[:2] + 1 for _ in range(tokens)]).to(torch.int32)
    x, routing = torch.randn(tokens, 192).to(dtype), torch.rand(tokens, 2)
    exact = exactly(e, x, ids)
    assert is_close(call(e, x, ids, routing), (exact * routing.double().unsqueeze(-1)).sum(1))
    assert is_close(call(e, x, ids), exact)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_are_activated_and_multiplied_by_ups(activation: str, dtype: torch.dtype) -> None:
    e = random_experts(6, 64, 128, 64, False, dtype, bias=True)
    ids = torch.randint(0, 6, (9, 2), dtype=torch.int32)
    x = torch.randn(9, 128).to(dtype) * 20  # so that some gates and ups are clamped
    gate, up = exactly(e, x, ids).chunk(2, -1)
    if activation == "swiglu_oai":
        assert (gate > 7).any()
        assert (up < -7).any()
        exact = gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (up.clamp(-7, 7) + 1)
    else:
        exact = up * (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh"))
    w = e.weight
    found = moe.moe_gated_linear(x, w, ids, activation, e.bias)
    assert is_close(found, exact)
    assert is_close(moe_torch.moe_gated_linear(x, w, ids, activation, e.bias), exact)


def test_nested_scales_may_have_an_offset_for_each_group() -> None:
    e = random_experts(3, 128, 256, 64, True, torch.float32, offsets=True)
    assert e.weight.absmax_offset is not None
    assert e.weight.absmax_offset.numel() == 6
    ids, x = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32), torch.randn(2, 256)
    assert is_close(call(e, x, ids), exactly(e, x, ids))


@pytest.mark.parametrize("tokens", [1, 60])
def test_experts_that_are_not_here_give_zeros(tokens: int) -> None:
    e = random_experts(4, 32, 64, 64, False, torch.float32, bias=True)
    ids = torch.tensor([[-1, 2, 4]], dtype=torch.int32).repeat(tokens, 1)
    x = torch.randn(tokens, 64)
    for found in (call(e, x, ids), moe_torch.moe_linear(x, e.weight, ids, e.bias, None)):
        assert not found[:, [0, 2]].any()
        assert is_close(found, exactly(e, x, ids))
    none = torch.full_like(ids, -1)
    assert not moe.moe_gated_linear(x, e.weight, none, "swiglu_oai", e.bias).any()


def test_no_tokens_give_no_results() -> None:
    e = random_experts(4, 32, 64, 64, False, torch.float32)
    ids = torch.empty(0, 2, dtype=torch.int32)
    assert call(e, torch.empty(0, 64), ids).shape == (0, 2, 32)
    assert call(e, torch.empty(0, 64), ids, torch.empty(0, 2)).shape == (0, 32)


def test_what_does_not_fit_is_refused_by_name() -> None:
    e = random_experts(4, 32, 64, 64, False, torch.float32)
    ids, x = torch.zeros(2, 2, dtype=torch.int32), torch.randn(2, 64)
    with pytest.raises(ValueError, match=r"experts must be torch\.int32"):
        call(e, x, ids.long())
    with pytest.raises(ValueError, match=r"on cpu, got torch\.int32"):
        call(e, x, ids.to("meta"))
    with pytest.raises(ValueError, match="x must be"):
        call(e, torch.randn(3, 64), ids)
    with pytest.raises(ValueError, match=r"routing_weights must be torch\.float32"):
        call(e, x, ids, torch.rand(2, 1))
    with pytest.raises(ValueError, match=r"bias must be torch.float32 \[4, 32\]"):
        call(Experts(e.weight, e.exact, torch.zeros(32)), x, ids)
    short = Weight(e.weight.packed, (4, 32, 64), e.weight.absmax[:100], 64)
    with pytest.raises(ValueError, match="absmax must be float32 with 128"):
        call(Experts(short, e.exact, None), x, ids)
    with pytest.raises(ValueError, match="expand their nested scales"):
        call(random_experts(4, 32, 64, 64, True, torch.float32), x, ids)
    with pytest.raises(ValueError, match="activation must be one of"):
        moe.moe_gated_linear(x, e.weight, ids, "relu")
