"""One norm without weights for queries and keys, with a factor of the queries (Muse-Glimmer)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from server.engine.runtime.layers.attention_spec import _shared_norms
from server.engine.runtime.layers.parts import UnknownLayerError


class Norm(nn.Module):
    eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@pytest.mark.parametrize("factor", [3.87, 0.3, 1.0, 11.31])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_factor_is_nearer_than_the_dtypes_rounding(factor: float, dtype: torch.dtype) -> None:
    queries, keys = _shared_norms(Norm(), factor, torch.ones(64, dtype=dtype))
    assert queries.weight.dtype == keys.weight.dtype == dtype
    product = queries.weight.double() * keys.weight.double()
    assert (product / factor - 1).abs().max() < 2e-4
    x = torch.randn(5, 64, dtype=dtype)
    # What attention makes of them: products of queries and keys.
    found = queries(x).double() @ keys(x).double().T
    expected = factor * (Norm()(x.double().float()).double() @ Norm()(x.double().float()).double().T)
    assert (found - expected).norm() < (1e-5 if dtype == torch.float32 else 0.01) * expected.norm()


def test_what_is_no_norm_is_named() -> None:
    with pytest.raises(UnknownLayerError, match="of the kind Identity"):
        _shared_norms(nn.Identity(), 2.0, torch.ones(64))
