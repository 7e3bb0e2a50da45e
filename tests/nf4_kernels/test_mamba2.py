"""nf4_kernels.mamba2 against the recurrence in float64, and against transformers' layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from nf4_kernels import cpu, mamba2
from nf4_kernels.gated_delta_params import Sequences
from nf4_kernels.mamba2_params import Mamba2
from tests.nf4_kernels.gated_delta_layers import BOUNDS, flags, indices, is_close
from tests.nf4_kernels.weights import using_isa

# (heads, head_dim, state_dim, groups)
SHAPES = [(6, 16, 24, 2), (3, 5, 20, 1), (4, 64, 128, 1), (4, 80, 16, 4)]
Shape = tuple[int, int, int, int]


@pytest.fixture(params=["torch", *cpu.ISAS])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each instruction set that this CPU has, in turn, and plain torch."""
    if request.param == "torch":
        monkeypatch.setattr(mamba2.cpu_mamba2, "takes", lambda p: False)
        yield
        return
    if cpu.load_error() is not None:
        pytest.skip("no CPU kernels")
    with using_isa(request.param):
        yield


def random_layer(shape: Shape, slots: int, tokens: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Mamba2:
    """States begin as random numbers: a sequence without one must not read them. Rows are views of joined columns."""
    heads, head_dim, state_dim, groups = shape
    width, channels, taps = heads * head_dim, heads * head_dim + 2 * groups * state_dim, changes.pop("taps", 4)
    generator = torch.Generator().manual_seed(sum(shape) + slots)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    joined = normal(tokens, width + channels + heads + 8).to(dtype)
    z, xbc, dt, _ = joined.split([width, channels, heads, 8], -1)
    parameters = normal(channels, taps) / taps**0.5, normal(channels) / 4
    rates = torch.rand(heads, generator=generator).mul(8).add(0.01).log(), normal(heads), normal(heads) - 2
    states = normal(slots, channels, taps - 1).to(dtype), normal(slots, heads, state_dim, head_dim) * 0.3
    norm = normal(width).mul(0.2).add(1), 1e-5, (0.0, float("inf")), groups, groups, False
    return replace(Mamba2(z, xbc, dt, *parameters, *rates, *norm, *states), **changes)


def exact(p: Mamba2, rows: slice, history: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The results of a sequence's rows, and what its slot holds afterwards, in float64."""
    keys, outs = p.groups * p.state_dim, []
    for z, xbc, dt in zip(*(x[rows].double() for x in (p.z, p.xbc, p.dt)), strict=True):
        window = torch.cat([history, xbc[:, None]], dim=1)
        history = window[:, 1:]
        mixed = (window * p.conv_weight.double()).sum(1)
        mixed = functional.silu(mixed if p.conv_bias is None else mixed + p.conv_bias.double())
        x = mixed[: p.width].view(p.heads, p.head_dim)
        b, c = (mixed[p.width + at :][:keys].view(p.groups, -1) for at in (0, keys))
        rate, y = functional.softplus(dt + p.dt_bias.double()).clamp(*p.dt_limit), []
        state = state.clone()
        for head in range(p.heads):
            group = head // (p.heads // p.groups)
            decay = torch.exp(-p.a_log[head].double().exp() * rate[head])
            state[head] = decay * state[head] + torch.outer(b[group], rate[head] * x[head])
            y.append(c[group] @ state[head] + p.d[head].double() * x[head])
        gate, out = functional.silu(z), torch.cat(y)
        if p.norm_weight is None:
            outs.append(out * gate)
            continue
        parts = (out if p.norm_before_gate else out * gate).view(p.norm_groups, -1)
        out = (parts / (parts.square().mean(1, keepdim=True) + p.eps).sqrt()).flatten() * p.norm_weight.double()
        outs.append(out * gate if p.norm_before_gate else out)
    return torch.stack(outs), history, state


def check(p: Mamba2, lengths: tuple[int, ...], slots: tuple[int, ...], has_state: tuple[bool, ...] | None) -> None:
    """One call for chunks of these lengths, or without has_state for one token each, with rows of padding poisoned."""
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    spans = [slice(*pair) for pair in itertools.pairwise(starts)]
    for x in (p.z, p.xbc, p.dt):
        x[starts[-1] :] = float("nan")
        for span, slot in zip(spans, slots, strict=True):
            if slot < 0:
                x[span] = float("nan")
    expected = {}
    for i, (span, slot) in enumerate(zip(spans, slots, strict=True)):
        if slot >= 0 and lengths[i]:
            kept = 1.0 if has_state is None or has_state[i] else 0.0
            expected[i] = exact(p, span, p.conv_state[slot].double() * kept, p.state[slot].double() * kept)
    others = [slot for slot in range(len(p.state)) if slot not in slots]
    before = p.state[others].clone(), p.conv_state[others].clone()
    chunks = () if has_state is None else (indices(*starts), flags(*has_state))
    out = mamba2.run(p, Sequences(indices(*slots), *chunks))
    assert out.isfinite().all()
    for i, (result, history, state) in expected.items():
        assert is_close(out[spans[i]], result, BOUNDS[p.xbc.dtype])
        assert is_close(p.state[slots[i]], state, BOUNDS[p.xbc.dtype])
        assert torch.equal(p.conv_state[slots[i]].double(), history)
    assert torch.equal(p.state[others], before[0])
    assert torch.equal(p.conv_state[others], before[1])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_step(shape: Shape, dtype: torch.dtype) -> None:
    check(random_layer(shape, slots=6, tokens=4, dtype=dtype), (1, 1, 1, 1), (4, -1, 0, 5), None)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
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
