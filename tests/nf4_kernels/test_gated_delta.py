"""nf4_kernels.gated_delta against the recurrence in float64, and against transformers' layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from nf4_kernels import cpu, gated_delta
from nf4_kernels.gated_delta_params import GatedDelta, Sequences
from tests.marks import with_rest
from tests.nf4_kernels.gated_delta_checks import check_chunks, check_step
from tests.nf4_kernels.gated_delta_layers import BOUNDS, flags, indices, is_close, random_layer
from tests.nf4_kernels.weights import using_isa_or_torch

# (key heads, value heads, dk, dv)
HEADS = [(2, 6, 16, 16), (1, 1, 8, 24), (3, 3, 20, 5), (2, 4, 128, 128)]


KINDS = with_rest(itertools.product(HEADS, BOUNDS), lambda kind: kind[0] is HEADS[0] or kind[1] is torch.bfloat16)
"""Heads and dtypes; `make test` has all of each."""


@pytest.fixture(params=["torch", *cpu.ISAS])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each instruction set that this CPU has, in turn, and plain torch."""
    with using_isa_or_torch(request.param, gated_delta.cpu_gated_delta, monkeypatch):
        yield


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("heads", "dtype"), KINDS)
def test_step(heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check_step(random_layer(heads, slots=6, dtype=dtype), (4, -1, 0, 5))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("heads", "dtype"), KINDS)
def test_chunks(heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    layer = random_layer(heads, slots=7, dtype=dtype)
    check_chunks(layer, (1, 5, 2, 0, 3, 35), (6, 0, -1, 2, 3, 4), (True, False, True, True, True, False))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("taps", [1, 2, 3, 5])
def test_other_numbers_of_taps(taps: int) -> None:
    check_step(random_layer((2, 4, 16, 16), slots=3, taps=taps), (2, 0))
    check_chunks(random_layer((2, 4, 16, 16), slots=3, taps=taps), (1, 9), (2, 0), (True, False))


@pytest.mark.usefixtures("isa")
def test_states_may_be_bfloat16() -> None:
    check_step(random_layer((2, 6, 16, 32), slots=3, state_dtype=torch.bfloat16), (2, -1, 0))
    check_chunks(random_layer((2, 6, 16, 32), slots=3, state_dtype=torch.bfloat16), (3, 1), (2, 0), (True, True))


@pytest.mark.usefixtures("isa")
def test_no_sequence_at_all() -> None:
    layer = random_layer((2, 4, 16, 16), slots=2)
    assert layer.step(layer.inputs(0), indices()).shape == (0, 64)
    assert not layer.chunks(layer.inputs(3), indices(0), indices(), flags()).any()


def test_transformers_gives_the_same() -> None:
    """A prompt in chunks of odd lengths, then single tokens, against one forward pass of transformers' own layer."""
    config = Qwen3_5TextConfig(
        hidden_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    torch.manual_seed(0)
    module = Qwen3_5GatedDeltaNet(config, 0).eval()
    torch.nn.init.normal_(module.conv1d.weight)
    torch.nn.init.normal_(module.norm.weight)
    hidden = torch.randn(1, 100, 32)
    with torch.no_grad():
        exact = module(hidden)[0].double()
        inputs = [
            projection(hidden[0])
            for projection in (module.in_proj_qkv, module.in_proj_z, module.in_proj_a, module.in_proj_b)
        ]
        weights = module.conv1d.weight[:, 0], module.A_log.float(), module.dt_bias.float(), module.norm.weight
        pools = torch.randn(2, module.conv_dim, 3), torch.randn(2, 6, 16, 8)

        def advanced(begin: int, length: int, sequences: Sequences) -> torch.Tensor:
            qkv, z, a, b = (x[begin : begin + length] for x in inputs)
            layer = GatedDelta(qkv, z, a, b, *weights, module.norm.variance_epsilon, *pools, 2)
            return gated_delta.run(layer, sequences)

        outs, done = [], 0
        for length in (1, 63, 2, 30):
            outs.append(advanced(done, length, Sequences(indices(1), indices(0, length), flags(done > 0))))
            done += length
        outs += [advanced(token, 1, Sequences(indices(1))) for token in range(done, 100)]
        found = module.out_proj(torch.cat(outs))
    assert is_close(found, exact, 1e-5)


def test_what_does_not_fit_is_named() -> None:
    layer = random_layer((2, 4, 16, 16), slots=2)
    qkv, z, a, b = layer.inputs(2)
    with pytest.raises(ValueError, match=r"qkv must be .* \[2, 128\], got torch.float32 \[2, 127\]"):
        layer.step((qkv[:, 1:], z, a, b), indices(0, 1))
    with pytest.raises(ValueError, match=r"z must be torch.float32 \[2, 64\], got torch.bfloat16"):
        layer.step((qkv, z.bfloat16(), a, b), indices(0, 1))
    with pytest.raises(ValueError, match=r"slots must be contiguous torch.int32 \[2\]"):
        layer.step((qkv, z, a, b), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"query_start_loc must be contiguous torch.int32 \[2\]"):
        layer.chunks((qkv, z, a, b), indices(0, 1, 2), indices(0), flags(True))
    with pytest.raises(ValueError, match="4 value heads are no multiple of 3 key heads"):
        gated_delta.run(replace(layer.tensors((qkv, z, a, b)), num_key_heads=3), Sequences(indices(0, 1)))


def test_threads_share_heads_and_sequences() -> None:
    """Results are the same bits with any number of threads."""
    layers = [random_layer((4, 8, 32, 32), slots=3) for _ in range(2)]
    outs = []
    for layer, threads in zip(layers, (1, 3), strict=True):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        outs.append(layer.chunks(layer.inputs(70), indices(0, 40, 41, 70), indices(2, 0, 1), flags(True, True, False)))
        torch.set_num_threads(before)
    assert torch.equal(*outs)
    assert torch.equal(layers[0].state, layers[1].state)
