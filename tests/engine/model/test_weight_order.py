"""The order in which a forward pass reads NF4 weights."""

from __future__ import annotations

import torch
from bitsandbytes.nn import Linear4bit
from torch import nn

from nf4_kernels.cuda.weight_order import next_weight
from server.checkpoint.experts.module import NF4Experts, StackedWeight
from server.engine.runtime.model.projections import GroupMember, NF4Linear, replace_projections
from server.engine.runtime.model.weight_order import set_weight_order
from tests.nf4_kernels.weights import quantized


def _nf4() -> Linear4bit:
    layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, compress_statistics=False, quant_type="nf4")
    moved: Linear4bit = layer.to("cpu")
    return moved


class _Attention(nn.Module):
    """o_proj is made before the projections that are called before it."""

    def __init__(self) -> None:
        super().__init__()
        self.o_proj, self.q_proj, self.k_proj, self.v_proj = (_nf4() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.o_proj(self.q_proj(x) + self.k_proj(x) + self.v_proj(x))
        return out


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Attention() for _ in range(2))
        self.twice, self.few, self.many, self.last = (_nf4() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.twice(self.twice(x))
        x = self.few(x) if x.shape[0] == 1 else self.many(x)
        out: torch.Tensor = self.last(x)
        return out


def _packed(module: object) -> int:
    linear = module.linear if isinstance(module, GroupMember) else module
    assert isinstance(linear, NF4Linear)
    return linear.packed.data_ptr()


def test_the_next_weight_is_known_where_it_is_always_the_same() -> None:
    model = _Model()
    replace_projections(model)
    first, second = model.layers
    expected = [
        (first.q_proj, first.o_proj),
        (first.o_proj, second.q_proj),
        (second.q_proj, second.o_proj),
    ]
    assert set_weight_order(model, lambda count: model(torch.randn(count, 64))) == len(expected)
    for linear, following in expected:
        found = next_weight(_packed(linear))
        assert found is not None
        assert found.packed == _packed(following)
    for alone in (second.o_proj, model.twice, model.few, model.many, model.last):
        assert next_weight(_packed(alone)) is None


def test_a_model_that_is_gone_leaves_nothing_behind() -> None:
    models = [_Model()]
    replace_projections(models[0])
    set_weight_order(models[0], lambda count: models[0](torch.randn(count, 64)))
    address = _packed(models[0].layers[0].q_proj)
    assert next_weight(address) is not None
    models.clear()
    assert next_weight(address) is None


class _Mixture(nn.Module):
    """A projection, experts, a projection and its next."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after, self.last = (_nf4() for _ in range(3))
        gate_up = StackedWeight(quantized((2, 64, 64), 64, False, seed=1).weight, None)
        down = StackedWeight(quantized((2, 64, 32), 64, False, seed=2).weight, None)
        self.experts = NF4Experts(gate_up, down, "silu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        x = self.experts(x, torch.zeros(x.shape[0], 1, dtype=torch.int64), torch.ones(x.shape[0], 1))
        out: torch.Tensor = self.last(self.after(x))
        return out


def test_experts_neither_have_a_next_weight_nor_are_one() -> None:
    model = _Mixture()
    replace_projections(model)
    with torch.inference_mode():
        assert set_weight_order(model, lambda count: model(torch.randn(count, 64))) == 1
    assert next_weight(_packed(model.before)) is None
    assert next_weight(_packed(model.after)) is not None
