"""Mamba2's launches on CUDA, in Triton's interpreter and on a GPU, against the recurrence in float64."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from nf4_kernels.gated_delta_params import Sequences
from nf4_kernels.mamba2_params import Mamba2
from server.engine.runtime.layers.stateful import mamba2_cuda, pieces
from server.engine.runtime.layers.stateful.pieces import Singles
from tests.engine.interpreted import run_interpreted
from tests.nf4_kernels.mamba2_layers import check, random_layer

_LENGTHS, _SLOTS = (1, 70, 2, 0, 64, 130, 5), (6, 0, 1, 2, 3, 4, 7)
_HAS_STATE = (True, False, True, True, True, False, True)


def run(p: Mamba2, lengths: tuple[int, ...], sequences: Sequences) -> torch.Tensor:
    """As a layer computes it, but that the gate of padding is a number."""
    p.z.nan_to_num_(0.0)
    if sequences.has_state is None:
        return mamba2_cuda.step(p, Singles.of(8, p.z.device).piece(sequences.slots))
    own = pieces.cut(mamba2_cuda.max_tokens(p), lengths, sequences.slots, sequences.has_state)
    return mamba2_cuda.chunks(p, own, max(lengths))


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """fla's chunk_simple_gla in float64, token by token."""
    states, o, bounds = given["initial_state"].double(), v.double(), given["cu_seqlens"].tolist()
    for sequence, (begin, end) in enumerate(itertools.pairwise(bounds)):
        for token in range(begin, end):
            added = k[0, token].double().unsqueeze(-1) * v[0, token].double().unsqueeze(-2)
            states[sequence] = states[sequence] * g[0, token].double().exp()[:, None, None] + added
            o[0, token] = (q[0, token].double().unsqueeze(-1) * states[sequence]).sum(-2) * given["scale"]
    return o.to(v.dtype), states.float()


def check_interpreted() -> None:
    """All launches in pieces of 64 tokens, and those around fla's."""
    mamba2_cuda.MAX_LIVE_BYTES = 1
    for shape, changes in (
        ((6, 16, 24, 2), {}),
        ((3, 5, 20, 1), {"norm_weight": None, "conv_bias": None}),
        ((2, 80, 16, 1), {"norm_before_gate": True, "dt_limit": (0.1, 0.5)}),
    ):
        check(random_layer(shape, 6, 4, **changes), (1, 1, 1, 1), (4, -1, 0, 5), None, run)
        check(random_layer(shape, 8, sum(_LENGTHS) + 3, **changes), _LENGTHS, _SLOTS, _HAS_STATE, run)
    mamba2_cuda._rule = lambda: recurrence  # type: ignore[assignment]
    mamba2_cuda.has_fla = lambda: True  # type: ignore[assignment]
    mamba2_cuda.LONG_CHUNK = 1
    layer = random_layer((6, 16, 24, 2), 8, sum(_LENGTHS) + 3, torch.bfloat16)
    check(layer, _LENGTHS, _SLOTS, _HAS_STATE, run, 2e-2)


def test_launches() -> None:
    pytest.importorskip("triton")
    run_interpreted("from tests.engine.layers.test_mamba2_cuda import check_interpreted; check_interpreted()")


def test_the_largest_model_stays_below_the_bound() -> None:
    """Granite 4.0 small's shape."""
    assert 500 < mamba2_cuda.max_tokens(random_layer((128, 64, 128, 1), 1, 1, torch.bfloat16)) < 2000


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(48, 64, 128, 1), (64, 64, 128, 8), (24, 128, 256, 1)])
@pytest.mark.parametrize("min_length", [1, 1 << 20], ids=["fla", "token by token"])
def test_on_a_gpu(shape: tuple[int, int, int, int], min_length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba2_cuda, "LONG_CHUNK", min_length)

    def layer(tokens: int) -> Mamba2:
        p = random_layer(shape, 8, tokens, torch.bfloat16)
        return replace(p, **{f.name: x.cuda() for f in fields(p) if isinstance(x := getattr(p, f.name), torch.Tensor)})

    check(layer(4), (1, 1, 1, 1), (4, -1, 0, 5), None, run)
    check(layer(sum(_LENGTHS) + 3), _LENGTHS, _SLOTS, _HAS_STATE, run, 2e-2)
