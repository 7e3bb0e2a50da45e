"""Norms and residuals in graphs put together by hand: forms that are fused, and those that look like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from server.engine.runtime.compile.passes.fusion import FusedOperations
from server.engine.runtime.model.lora import adding_masked
from server.engine.runtime.model.projections import NF4Linear
from tests.engine.compile.fusing import BF16, Around, always, close, compiled, count, fusing, nf4


def _views(m: Any, h: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = h + m.first(m.norm(h).view(-1, 64)).view(h.shape)
    return out


def _norm_read_twice(m: Any, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    normalized = m.norm(h)
    return m.first(normalized), m.second(normalized.view(-1, 64))


def _norm_also_given(m: Any, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    normalized = m.norm(h)
    return m.first(normalized), normalized.view(-1, 64)


def _norm_is_the_residual(m: Any, h: torch.Tensor) -> Any:
    normalized = m.norm(h)
    return normalized + m.first(normalized)


def _gemm_read_twice(m: Any, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = m.first(h)
    return h + y, y.sum(-1)


def _twice_itself(m: Any, h: torch.Tensor) -> Any:
    y = m.first(h)
    return y + y


def _other_scale(m: Any, h: torch.Tensor) -> Any:
    return torch.add(h, m.first(h), alpha=2)


def _other_shape(m: Any, h: torch.Tensor) -> Any:
    return h[0, :1] + m.first(h)


def _not_contiguous(m: Any, h: torch.Tensor) -> Any:
    return h.transpose(0, 1).contiguous().transpose(0, 1) + m.first(h)


def _x_not_contiguous(m: Any, h: torch.Tensor) -> Any:
    return h.transpose(0, 1).contiguous() + m.first(h.transpose(0, 1))


def _other_dtype(m: Any, h: torch.Tensor) -> Any:
    return h.float() + m.first(h)


def _other_order(m: Any, h: torch.Tensor) -> Any:
    wide = h.float()
    return h + m.first((torch.rsqrt(0.3 + wide.pow(2).mean(2, keepdim=True)) * wide).to(h.dtype) * m.norm.weight)


def _normalised(m: Any, h: torch.Tensor, squared: torch.Tensor, dim: int, weight: torch.Tensor) -> Any:
    """Like the norm, for other arguments."""
    return m.first(weight * (h.float() * torch.rsqrt(squared.mean(dim, keepdim=True) + 0.3)).to(h.dtype))


def _over_rows(m: Any, h: torch.Tensor) -> Any:
    return _normalised(m, h, h.float().pow(2), 1, m.norm.weight)


def _of_another(m: Any, h: torch.Tensor) -> Any:
    return _normalised(m, h, (h * 2).float().pow(2), -1, m.norm.weight)


def _other_power(m: Any, h: torch.Tensor) -> Any:
    return _normalised(m, h, h.float().pow(4), -1, m.norm.weight)


def _one_weight(m: Any, h: torch.Tensor) -> Any:
    return _normalised(m, h, h.float().pow(2), -1, m.norm.weight[:1])


def _part(m: Any, h: torch.Tensor) -> Any:
    return m.first(m.norm(h.repeat(1, 1, 2)[..., :64]))


def _norm_and_norm_of_it(m: Any, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    normalized = m.norm(h)
    return m.first(m.norm(normalized)), m.second(normalized)


def _two_residuals(m: Any, h: torch.Tensor) -> Any:
    return h * 2 + (m.first(h) + h)


def _heads(m: Any, h: torch.Tensor) -> Any:
    return m.first((m.norm.weight[:16] * _rms(h.view(2, 3, 4, 16))).view(h.shape))


def _rms(h: torch.Tensor) -> torch.Tensor:
    wide = h.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 0.3)).to(h.dtype)


def _wide_weight(m: Any, h: torch.Tensor) -> Any:
    return m.first((m.norm.weight.float() * _rms(h)).to(h.dtype))


def _computed_weight(m: Any, h: torch.Tensor) -> Any:
    return m.first((1 + m.norm.weight) * _rms(h))


def _written_between(m: Any, h: torch.Tensor) -> Any:
    residual = h * 2
    y = m.first(h)
    residual.mul_(3)
    torch.ops.nf4_server_lora.add(residual, h, m.a, m.b)
    out = residual + y
    residual.zero_()
    return out


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda m, h: m.first(m.norm(h)) + h, {"norm residual": 1}),
        (_views, {"norm residual": 1}),
        (_other_order, {"norm residual": 1}),
        (_norm_and_norm_of_it, {"norm": 1, "plain": 1, "rsqrt": 1}),
        (_two_residuals, {"residual": 1}),
        (lambda m, h: m.second(m.norm(h + m.first(h))), {"residual": 1, "norm": 1}),
        (lambda m, h: m.first(h) + m.second(h), {"residual": 1, "plain": 1}),
        (_norm_read_twice, {"norm": 2}),
        (_norm_also_given, {"plain": 1, "rsqrt": 1}),
        (_norm_is_the_residual, {"residual": 1, "rsqrt": 1}),
        (lambda m, h: m.first(m.norm(m.norm(h))), {"norm": 1, "rsqrt": 1}),
        (_gemm_read_twice, {"plain": 1}),
        (_twice_itself, {"plain": 1}),
        (_other_scale, {"plain": 1}),
        (_other_shape, {"plain": 1}),
        (_other_dtype, {"plain": 1}),
        (_not_contiguous, {"plain": 1}),
        (_x_not_contiguous, {"plain": 1}),
        *((form, {"plain": 1, "rsqrt": 1}) for form in (_over_rows, _of_another, _other_power, _one_weight, _part)),
        *((form, {"plain": 1, "rsqrt": 1}) for form in (_heads, _wide_weight, _computed_weight)),
        (_written_between, {"residual": 1}),
    ],
)
@pytest.mark.filterwarnings("error:erase_node")
@torch.inference_mode()
def test_forms(function: Callable[..., Any], expected: dict[str, int]) -> None:
    module = Around(function)
    module.a, module.b = torch.randn(2, 4, 64, dtype=BF16), torch.randn(2, 4, 64, dtype=BF16)
    h = torch.randn(2, 3, 64, dtype=BF16)
    with adding_masked(torch.arange(6)[:, None] % 2 == torch.arange(2)), fusing() as graphs:
        wanted, found = module(h.clone()), compiled(module)(h.clone())
    for one, other in zip(found, wanted, strict=True):
        assert close(one, other)
    assert graphs == [expected]


@torch.inference_mode()
def test_sizes_that_vary_are_not_fused() -> None:
    module = Around(lambda m, h: m.first(m.norm(h)) + h)
    h = torch.randn(1, 3, 64, dtype=BF16)
    torch._dynamo.decorators.mark_unbacked(h, 1)
    with fusing() as graphs:
        assert close(compiled(module, dynamic=None)(h), module(h))
    assert graphs == [{"plain": 1, "rsqrt": 1}]


@pytest.mark.parametrize("between", [True, False])
def test_nothing_is_fused_behind_a_write(between: bool) -> None:
    """Graphs that inductor's passes see have none; make_fx leaves them in."""
    linear = NF4Linear.of(nf4(64, 64))

    def function(h: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y = linear(h)
        if between:
            residual.add_(1)
        return residual + y

    h = torch.randn(3, 64, dtype=BF16)
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(h, h.clone()).graph
    FusedOperations(always)(graph)
    assert count(graph) == ({"plain": 1} if between else {"residual": 1})
