"""Projections that share their input, as one GEMM: the same numbers, with nested scales where these can be joined."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from torch import nn

from nf4_kernels import reference
from server.checkpoint.sharding.slices import Part, cut_linear
from server.checkpoint.weight import WeightBuffers
from server.engine.runtime.model import projections
from server.engine.runtime.model.lora import dequantized
from server.engine.runtime.model.projections import GroupMember, NF4Linear, replace_projections, weight_bytes
from tests.nf4_kernels.weights import is_close, quantized


class _Attention(nn.Module):
    def __init__(self, sizes: tuple[int, int, int], k: int, nested: tuple[bool, bool, bool]) -> None:
        super().__init__()
        for name, n, compress in zip(("q_proj", "k_proj", "v_proj"), sizes, nested, strict=True):
            layer = Linear4bit(
                k, n, bias=False, compute_dtype=torch.float32, compress_statistics=compress, quant_type="nf4"
            )
            setattr(self, name, layer.to("cpu"))

    def weight(self) -> torch.Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        return torch.cat([dequantize_4bit(layer.weight.data, layer.weight.quant_state).float() for layer in layers])


@pytest.mark.parametrize(
    ("sizes", "nested", "joined"),
    [
        ((64, 32, 32), (True, True, True), True),  # 512 k: 32 rows are 256 blocks of 64
        ((64, 32, 48), (True, True, True), False),  # v has a group of fewer than 256
        ((64, 32, 32), (True, False, True), False),
        ((64, 32, 32), (False, False, False), False),
    ],
)
def test_a_group_keeps_nested_scales_where_they_can_be_joined(
    sizes: tuple[int, int, int], nested: tuple[bool, bool, bool], joined: bool
) -> None:
    module = _Attention(sizes, 512, nested)
    x = torch.randn(3, 512)
    expected = x.double() @ module.weight().double().T
    assert replace_projections(module) == 3
    first = module.q_proj
    assert isinstance(first, GroupMember)
    assert isinstance(first.linear, NF4Linear)
    assert (first.linear.absmax_8bit is not None) == joined
    # Half a byte a weight, and per 64 of them a scale of 1 byte (and a little) or 4.
    codes = sum(sizes) * 512 // 2
    assert codes * (1 + 1 / 32) < weight_bytes(module) < codes * (1 + 1 / 8) + 4096
    got = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], -1)
    assert is_close(got, expected)


def test_weights_of_layers_move_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each layer's weights find room where those of the layer before lay; those outside of layers stay."""
    model = nn.Module()
    model.layers = nn.ModuleList(_Attention((64, 32, 32), 512, (True,) * 3) for _ in range(2))
    layers = [*model.layers, model]
    for layer in layers:
        layer.o_proj = Linear4bit(512, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    moved = []

    def move(module: WeightBuffers) -> list[torch.Tensor]:
        moved.append(module)
        return []

    monkeypatch.setattr(projections, "_move", move)
    assert replace_projections(model) == 9
    assert moved == [layer.o_proj for layer in model.layers]
    assert isinstance(model.o_proj, NF4Linear)


@pytest.mark.parametrize(
    "part", [Part((300, 512), (range(99, 198),), range(512)), Part((300, 512), (range(300),), range(256, 512))]
)
def test_a_shards_weight_is_its_part_of_the_whole_one(part: Part) -> None:
    """Its blocks begin inside a group of 256, or skip those of the other columns."""
    q = quantized(part.whole, 64, True, seed=1)
    linear = NF4Linear.of(cut_linear(q.packed, q.state, part, None, torch.float32, torch.device("cpu")))
    assert linear.group_offset or linear.group_skip
    whole = reference.dequantize(q.weight, torch.float32)
    expected = whole[part.rows[0].start : part.rows[0].stop, part.columns.start : part.columns.stop]
    assert torch.equal(dequantized(linear, torch.float32), expected)
    x = torch.randn(3, linear.in_features)
    assert is_close(linear(x), x @ expected.T)


def test_members_of_a_group_may_be_called_in_any_order_and_with_inputs_of_their_own() -> None:
    module = _Attention((64, 32, 32), 512, (True, True, True))
    weights = module.weight().split((64, 32, 32))
    replace_projections(module)
    x, other = torch.randn(3, 512), torch.randn(2, 512)
    calls = [(1, x), (2, x), (0, x), (0, other), (1, x), (2, other), (2, x), (0, x), (1, other)]
    for index, given in calls:
        found = (module.q_proj, module.k_proj, module.v_proj)[index](given)
        assert is_close(found, given.double() @ weights[index].double().T)


class _Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wg = Linear4bit(64, 8, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.wg.weight.type(torch.float32))


def test_a_layer_whose_weight_the_class_reads_itself_is_expanded() -> None:
    router, x = _Router(), torch.randn(3, 64)
    expected = x @ dequantize_4bit(router.wg.weight.data, router.wg.weight.quant_state).float().T
    replace_projections(router)
    torch.testing.assert_close(router(x), expected)


def test_a_layer_that_two_blocks_have_is_replaced_in_both() -> None:
    linear = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    blocks = nn.ModuleList([nn.ModuleDict({"o_proj": linear}), nn.ModuleDict({"o_proj": linear})])
    x = torch.randn(2, 64)
    expected = x @ dequantize_4bit(linear.weight.data, linear.weight.quant_state).float().T
    assert replace_projections(nn.ModuleDict({"layers": blocks})) == 2
    for block in blocks:
        assert torch.allclose(block["o_proj"](x), expected, atol=1e-2)
