"""The output layer on CPU: how its weight is kept, and that adapters get it as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nf4_kernels import cpu
from server.engine.runtime.model.cpu_linear import Bf16Linear, use_cpu_kernels
from server.engine.runtime.model.lora import bias_of, dequantized
from tests.nf4_kernels.weights import using_isa


class Model(nn.Module):
    """A model that has nothing but an output layer of 96 tokens and 64 columns."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.lm_head = nn.Linear(64, 96)
        with torch.no_grad():
            self.lm_head.weight.copy_(weight)


def _weight() -> torch.Tensor:
    return (torch.randn(96, 64, generator=torch.Generator().manual_seed(1)) * 0.02).to(torch.bfloat16).float()


@pytest.mark.parametrize("isa", cpu.ISAS)
@torch.no_grad()
def test_a_bfloat16_weight_is_kept_without_loss(isa: str) -> None:
    model = Model(_weight())
    plain, bias = model.lm_head, model.lm_head.bias
    with using_isa(isa):
        use_cpu_kernels(model)
        assert isinstance(model.lm_head, Bf16Linear)
        for rows in (1, 3, 20):
            x = torch.randn(rows, 64)
            assert torch.allclose(model.lm_head(x), plain(x), rtol=0, atol=1e-5)
    for dtype in (torch.float32, torch.bfloat16):
        got = dequantized(model.lm_head, dtype)
        assert got.dtype is dtype
        assert torch.equal(got.float(), plain.weight)
    assert bias_of(model.lm_head) is bias


@torch.no_grad()
def test_a_weight_that_bfloat16_does_not_hold_is_left_alone() -> None:
    model = Model(_weight() + 2.0**-20)
    assert cpu.load_error() is None
    use_cpu_kernels(model)
    assert type(model.lm_head) is nn.Linear
