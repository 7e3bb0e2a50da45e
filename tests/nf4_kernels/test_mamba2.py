"""nf4_kernels.mamba2 against the recurrence in float64, and against transformers' layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from nf4_kernels import cpu, mamba2
from nf4_kernels.gated_delta_params import Sequences
from nf4_kernels.mamba2_params import Mamba2
from tests.marks import with_rest
from tests.nf4_kernels.gated_delta_layers import BOUNDS, flags, indices, is_close
from tests.nf4_kernels.mamba2_layers import SHAPES, Shape, check, random_layer
from tests.nf4_kernels.weights import using_isa_or_torch

KINDS = with_rest(itertools.product(SHAPES, BOUNDS), lambda kind: kind[0] is SHAPES[0] or kind[1] is torch.bfloat16)
"""Shapes and dtypes; `make test` has all of each."""


@pytest.fixture(params=["torch", *cpu.ISAS])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each instruction set that this CPU has, in turn, and plain torch."""
    with using_isa_or_torch(request.param, mamba2.cpu_mamba2, monkeypatch):
        yield


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("shape", "dtype"), KINDS)
def test_step(shape: Shape, dtype: torch.dtype) -> None:
    check(random_layer(shape, slots=6, tokens=4, dtype=dtype), (1, 1, 1, 1), (4, -1, 0, 5), None)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("shape", "dtype"), KINDS)
def test_chunks(shape: Shape, dtype: torch.dtype) -> None:
    lengths, slots = (1, 5, 2, 0, 3, 70), (6, 0, -1, 2, 3, 4)
    layer = random_layer(shape, slots=7, tokens=sum(lengths) + 3, dtype=dtype)
    check(layer, lengths, slots, (True, False, True, True, True, False))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    "changes",
    [
        {"norm_weight": None},
        {"norm_before_gate": True},
        {"norm_groups": 1},
        {"conv_bias": None},
        {"dt_limit": (0.1, 0.5)},
        {"taps": 1},
        {"taps": 2},
    ],
    ids=str,
)
def test_kinds_of_layers(changes: dict[str, Any]) -> None:
    check(random_layer(SHAPES[0], 3, 2, **changes), (1, 1), (2, 0), None)
    check(random_layer(SHAPES[0], 3, 10, **changes), (1, 9), (2, 0), (True, False))


@pytest.mark.usefixtures("isa")
def test_many_sequences() -> None:
    check(random_layer(SHAPES[0], 150, 150), (1,) * 150, tuple(range(149, -1, -1)), None)
    lengths = (130, 3, 64, 1, 65)
    check(random_layer(SHAPES[0], 5, sum(lengths)), lengths, (3, 1, 0, 4, 2), (True,) * 5)


@pytest.mark.usefixtures("isa")
def test_no_sequence_at_all() -> None:
    assert mamba2.run(random_layer(SHAPES[0], 2, 0), Sequences(indices())).shape == (0, 96)
    assert not mamba2.run(random_layer(SHAPES[0], 2, 3), Sequences(indices(), indices(0), flags())).any()


def test_threads_share_heads_and_sequences() -> None:
    """Results are the same bits with any number of threads; the fixture of all tests sets their number back."""
    layers, outs = [random_layer(SHAPES[2], slots=3, tokens=70) for _ in range(2)], []
    for layer, threads in zip(layers, (1, 3), strict=True):
        torch.set_num_threads(threads)
        chunks = indices(0, 40, 41, 70), flags(True, True, False)
        outs.append(mamba2.run(layer, Sequences(indices(2, 0, 1), *chunks)))
    assert torch.equal(*outs)
    assert torch.equal(layers[0].state, layers[1].state)


def test_transformers_gives_the_same() -> None:
    """A prompt in chunks of odd lengths, then single tokens, against one forward pass of transformers' own layer."""
    config = NemotronHConfig(
        hidden_size=32, mamba_num_heads=6, mamba_head_dim=8, ssm_state_size=16, n_groups=2, chunk_size=16,
        layers_block_type=["linear_attention"], time_step_min=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    module = NemotronHMamba2Mixer(config, 0).eval()
    for parameter in (module.conv1d.weight, module.norm.weight, module.D, module.dt_bias):
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(1, 100, 32)
    with torch.no_grad():
        expected = module(hidden)[0].double()
        columns = module.in_proj(hidden[0]).split([48, module.conv_dim, 6], -1)
        layer = Mamba2(
            *columns, module.conv1d.weight[:, 0], module.conv1d.bias, module.A_log, module.D, module.dt_bias,
            module.norm.weight, config.layer_norm_epsilon, module.time_step_limit, 2, 2, False,
            torch.randn(2, module.conv_dim, 3), torch.randn(2, 6, 16, 8),
        )  # fmt: skip
        found, begin = [], 0
        for length in (1, 63, 2, 30, *[1] * 4):
            rows = slice(begin, begin + length)
            part = replace(layer, **{name: getattr(layer, name)[rows] for name in ("z", "xbc", "dt")})
            chunks = (indices(0, length), flags(begin > 0)) if length > 1 or not begin else ()
            found.append(module.out_proj(mamba2.run(part, Sequences(indices(1), *chunks))))
            begin += length
    assert is_close(torch.cat(found), expected, BOUNDS[torch.float32])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"groups": 5}, "groups is 5"),
        ({"d": torch.zeros(6, dtype=torch.float64)}, "d must be torch.float32"),
        ({"z": torch.zeros(2, 3)}, "z must be"),
        ({"conv_weight": torch.zeros(4, 192).t()}, "conv_weight must be contiguous"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], said: str) -> None:
    layer = replace(random_layer(SHAPES[0], 3, 2), **changes)
    with pytest.raises(ValueError, match=said):
        mamba2.run(layer, Sequences(indices(2, 0)))
    with pytest.raises(ValueError, match="slots must be"):
        mamba2.run(random_layer(SHAPES[0], 3, 2), Sequences(indices(2)))
