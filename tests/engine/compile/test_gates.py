"""GEMMs that compute the gated activation: where they do, where not, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from server.engine.runtime.compile.passes.fusion import FusedOperations
from server.engine.runtime.compile.passes.matching import HasLaunch
from server.engine.runtime.model.lora import adding_masked
from server.engine.runtime.model.projections import NF4Linear
from tests.engine.compile.fusing import BF16, always, close, compiled, count, fusing, nf4, sixteen

pytestmark = pytest.mark.filterwarnings("error:erase_node")


class Gated(nn.Module):
    """What function(self, h) makes of h [3, 15, 64] with GEMMs of it, 256 wide, and of their halves."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any], dtype: torch.dtype = BF16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.norm = LlamaRMSNorm(64, 0.3).to(dtype).requires_grad_(False)
        self.norm.weight.uniform_(0.5, 2)
        self.up, self.biased, self.down, self.narrow, self.square, self.few = (
            NF4Linear.of(nf4(k, n, dtype)) for k, n in ((64, 256), (64, 256), (128, 64), (64, 64), (128, 128), (64, 24))
        )
        self.biased.bias = torch.randn(256, dtype=dtype)
        self.a, self.b = torch.randn(2, 4, 64, dtype=dtype), torch.randn(2, 4, 256, dtype=dtype)

    def forward(self, h: torch.Tensor) -> Any:
        return self.function(self, h)


def halves(gate_up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return gate_up.split((128, 128), -1)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = halves(gate_up)
    return functional.silu(gate) * up


def wide_sigmoid(m: Any, h: torch.Tensor) -> Any:
    gate, up = halves(m.up(h))
    wide = gate.float()
    return m.down(up * (wide * torch.sigmoid(wide)).to(BF16))


def gelu(m: Any, h: torch.Tensor) -> Any:
    gate, up = halves(m.up(h))
    return h + m.down(functional.gelu(gate, approximate="tanh") * up)


def also_given(m: Any, h: torch.Tensor) -> Any:
    x = swiglu(m.up(h))
    return m.down(x), x


def added_to_its_gemm(m: Any, h: torch.Tensor) -> Any:
    x = swiglu(m.up(h))
    return x + m.square(x)


def written_between(m: Any, h: torch.Tensor) -> Any:
    x = h * 2
    gate_up = m.up(x)
    x.mul_(3)
    torch.ops.nf4_server_lora.add(x, h, m.a, m.b[..., :64].contiguous())
    out = swiglu(gate_up)
    return out, x


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda m, h: m.down(swiglu(m.up(h)).reshape(45, 128)), {"silu": 1, "plain": 1}),
        (lambda m, h: m.down(swiglu(m.up(h).reshape(45, 256))), {"silu": 1, "plain": 1}),
        (lambda m, h: m.down(swiglu(m.biased(h))), {"silu": 1, "plain": 1}),
        (lambda m, h: m.down(swiglu(m.biased(m.norm(h)))), {"norm silu": 1, "plain": 1}),
        (lambda m, h: m.narrow(swiglu(m.up(h)).reshape(-1, 64)), {"silu": 1, "plain": 1}),
        (lambda m, h: m.down(swiglu(m.up(m.down(swiglu(m.up(h)))))), {"silu": 2, "plain": 2}),
        (lambda m, h: swiglu(m.up(h)) + swiglu(m.biased(h)), {"silu": 2}),
        (wide_sigmoid, {"silu": 1, "plain": 1}),
        (gelu, {"gelu_tanh": 1, "residual": 1}),
        (also_given, {"silu": 1, "plain": 1}),
        (added_to_its_gemm, {"silu": 1, "residual": 1}),
        (written_between, {"silu": 1}),
    ],
)
def test_forms_that_are_fused(function: Callable[..., Any], expected: dict[str, int]) -> None:
    check(function, expected)


def exact_gelu(m: Any, h: torch.Tensor) -> Any:
    gate, up = halves(m.up(h))
    return functional.gelu(gate) * up


def up_is_activated(m: Any, h: torch.Tensor) -> Any:
    gate, up = halves(m.up(h))
    return functional.silu(up) * gate


def gate_twice(m: Any, h: torch.Tensor) -> Any:
    gate, _ = halves(m.up(h))
    return functional.silu(gate) * gate


def gate_up_also_given(m: Any, h: torch.Tensor) -> Any:
    gate_up = m.up(h)
    return swiglu(gate_up), gate_up


def gate_up_read_twice(m: Any, h: torch.Tensor) -> Any:
    gate_up = m.up(h)
    return swiglu(gate_up) * gate_up.reshape(45, 256).sum()


def gate_also_given(m: Any, h: torch.Tensor) -> Any:
    gate, up = halves(m.up(h))
    return functional.silu(gate) * up, gate


def up_also_given(m: Any, h: torch.Tensor) -> Any:
    gate, up = halves(m.up(h))
    return functional.silu(gate) * up, up * 2


def activated_also_given(m: Any, h: torch.Tensor) -> Any:
    gate, up = halves(m.up(h))
    x = functional.silu(gate)
    return x * up, x


def sigmoid_also_given(m: Any, h: torch.Tensor) -> Any:
    gate, up = halves(m.up(h))
    wide = gate.float()
    share = torch.sigmoid(wide)
    return (wide * share).to(BF16) * up, share


def rounded_once(m: Any, h: torch.Tensor) -> Any:
    gate, up = halves(m.up(h))
    return (functional.silu(gate.float()) * up.float()).to(BF16)


def halves_of_two(m: Any, h: torch.Tensor) -> Any:
    gate_up = m.up(h)
    gate, _ = halves(gate_up)
    _, up = halves(gate_up * 2)
    return functional.silu(gate) * up


def of_two_gemms(m: Any, h: torch.Tensor) -> Any:
    return functional.silu(halves(m.up(h))[0]) * halves(m.biased(h))[1]


def unequal(m: Any, h: torch.Tensor) -> Any:
    gate, up = m.up(h).split((64, 192), -1)
    return functional.silu(gate) * up[..., :64]


def halves_of_another_shape(m: Any, h: torch.Tensor) -> Any:
    gate, up = m.up(h).reshape(-1, 64).split((32, 32), -1)
    return functional.silu(gate) * up


def halves_of_rows(m: Any, h: torch.Tensor) -> Any:
    gate, up = m.up(h[:2]).split((1, 1), 0)
    return functional.silu(gate) * up


def other_cube(m: Any, h: torch.Tensor) -> Any:
    gate, up = halves(m.up(h))
    wide = gate.float()
    bent = torch.tanh(0.7978845608028654 * (wide + 0.05 * wide * wide * wide))
    return (0.5 * wide * (1 + bent)).to(BF16) * up


def few_columns(m: Any, h: torch.Tensor) -> Any:
    gate, up = m.few(h).split((12, 12), -1)
    return functional.silu(gate) * up


def with_an_adapter(m: Any, h: torch.Tensor) -> Any:
    gate_up = m.up(h)
    torch.ops.nf4_server_lora.add(gate_up, h, m.a, m.b)
    return swiglu(gate_up)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        *(
            (function, {"plain": 1})
            for function in (
                exact_gelu,
                up_is_activated,
                gate_twice,
                gate_up_also_given,
                gate_up_read_twice,
                gate_also_given,
                up_also_given,
                activated_also_given,
                sigmoid_also_given,
                rounded_once,
                halves_of_two,
                unequal,
                halves_of_another_shape,
                halves_of_rows,
                other_cube,
                few_columns,
                with_an_adapter,
            )
        ),
        (of_two_gemms, {"plain": 2}),
        (lambda m, h: swiglu(m.up(h) * 2), {"plain": 1}),
        (lambda m, h: swiglu(m.up(h) + h @ m.a[0].T @ m.b[0]), {"residual": 1}),
        (lambda m, h: swiglu(m.up(h.transpose(0, 1))), {"plain": 1}),
        (lambda m, h: swiglu(h.repeat(1, 1, 4)), {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_forms_that_are_not(function: Callable[..., Any], expected: dict[str, int]) -> None:
    check(function, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_only_bfloat16(dtype: torch.dtype) -> None:
    check(lambda m, h: m.down(swiglu(m.up(h))), {"plain": 2}, dtype)


def test_only_gemms_with_a_launch() -> None:
    """The GEMM needs a gated launch; the norm in front may be without one."""

    def swiglu_of_norm(m: Any, h: torch.Tensor) -> Any:
        return m.down(swiglu(m.up(m.norm(h))))

    check(swiglu_of_norm, {"plain": 2, "rsqrt": 1}, fuses=lambda *question: question[3] != [256, 64])
    check(swiglu_of_norm, {"silu": 1, "plain": 1, "rsqrt": 1}, fuses=lambda *question: not question[-1])


def test_only_gemms_whose_launch_gates() -> None:
    asked: list[tuple[Any, ...]] = []

    def gates(*question: Any) -> bool:
        asked.append(question)
        return False

    check(lambda m, h: m.down(swiglu(m.up(m.norm(h)))), {"norm": 1, "plain": 1}, gates=gates)
    assert asked == [(torch.device("cpu"), BF16, 45, [256, 64], 64, True, True)]
    assert FusedOperations(gates=gates).uuid() is None


@torch.inference_mode()
def check(
    function: Callable[..., Any],
    expected: dict[str, int],
    dtype: torch.dtype = BF16,
    fuses: HasLaunch = always,
    gates: HasLaunch = sixteen,
) -> None:
    """What is in the graph, which gives what the module gives."""
    module = Gated(function, dtype)
    h = torch.randn(3, 15, 64, dtype=dtype)
    others = torch.arange(45)[:, None] % 2 == torch.arange(2)
    with adding_masked(others), fusing(fuses, gates=gates) as graphs:
        wanted, found = module(h), compiled(module)(h)
    pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
    for one, other in pairs:
        assert close(one, other)
    assert graphs == [expected]


@pytest.mark.parametrize("between", [True, False])
def test_nothing_is_fused_behind_a_write(between: bool) -> None:
    """Graphs that inductor's passes see have none; make_fx leaves them in."""
    linear = NF4Linear.of(nf4(64, 256))

    def function(h: torch.Tensor) -> torch.Tensor:
        gate_up = linear(h)
        if between:
            h.add_(1)
        return swiglu(gate_up)

    traced = make_fx(function, select_decomp_table(), tracing_mode="fake", _allow_non_fake_inputs=True)
    graph = traced(torch.randn(3, 64, dtype=BF16)).graph
    FusedOperations(always, gates=always)(graph)
    assert count(graph) == ({"plain": 1} if between else {"silu": 1})
