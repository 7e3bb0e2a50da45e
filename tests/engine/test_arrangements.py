"""Products that get their input arranged by the activation or the attention in front of them: where, where not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from server.engine.runtime.attention.base import IMPLEMENTATION, attending
from server.engine.runtime.fusion import FusedOperations
from server.engine.runtime.projections import NF4Linear
from tests.engine.fusing import BF16, close, compiled, fusing, nf4
from tests.engine.test_fusion import logits, nf4_model
from tests.engine.test_rotations import Uncached

SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 192,
}


def thirty_two(*_: object) -> int:
    return 32


@pytest.mark.parametrize(
    ("family", "tokens", "tile"),
    [
        *((family, 40, 64) for family in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")),
        ("llama", 64, 32),
        ("llama", 5, 32),
        ("gemma3_text", 5, 32),
    ],
)
@torch.inference_mode()
def test_a_layer_of(family: str, tokens: int, tile: int) -> None:
    """An activation stays where there are few rows."""
    gemma = family.startswith("gemma")
    model = nf4_model(family, **SIZES, **({"layer_types": ["full_attention"]} if gemma else {}))
    model.set_attn_implementation(IMPLEMENTATION)
    layer = model.get_decoder().layers[0]
    with attending(Uncached()):
        wanted = logits(model, tokens)
        layer.forward = compiled(layer.forward)
        with fusing(rotates=True, tile_rows=lambda *_: tile) as graphs:
            found = logits(model, tokens)
    gated = int(tokens > 32)
    if gemma:
        own = {"plain": 3 - gated, "arranged": 1 + gated, "gelu_tanh": gated}
    else:
        own = {"norm": 2, "residual": 1 - gated, "arranged residual": 1 + gated, "silu": gated}
    assert graphs[0] == +Counter({"rotated": 1, "rsqrt": 4 * gemma, **own})
    assert close(found, wanted)


@torch.inference_mode()
def test_only_products_with_such_a_launch() -> None:
    """And the attention only where its rows are a multiple of 256."""
    asked: list[tuple[Any, ...]] = []

    def tile_rows(*question: Any) -> int:
        asked.append(question)
        return 0 if question[3] == [64, 96] else 32

    model = nf4_model("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    layer = model.get_decoder().layers[0]
    with attending(Uncached()):
        layer.forward = compiled(layer.forward)
        with fusing(rotates=True, tile_rows=tile_rows) as graphs:
            logits(model, 7)
    assert graphs == [{"norm": 2, "residual": 2, "rotated": 1}]
    assert asked == [
        (torch.device("cpu"), BF16, 7, shape, 64, nested) for shape, nested in [([64, 64], True), ([64, 96], True)]
    ]


class Gated(nn.Module):
    """A product of what function(self, gate_up) makes of another one's halves."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.up, self.down = NF4Linear(nf4(64, 256)), NF4Linear(nf4(128, 64))
        self.narrow, self.square = NF4Linear(nf4(64, 64)), NF4Linear(nf4(128, 128))

    def forward(self, h: torch.Tensor) -> Any:
        return self.function(self, self.up(h))


def halves(gate_up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return gate_up.split((128, 128), -1)


def swiglu(m: Any, gate_up: torch.Tensor) -> Any:
    gate, up = halves(gate_up)
    return m.down((functional.silu(gate) * up).reshape(45, 128))


def wide_sigmoid(m: Any, gate_up: torch.Tensor) -> Any:
    gate, up = halves(gate_up)
    wide = gate.float()
    return m.down(up * (wide * torch.sigmoid(wide)).to(BF16))


def exact_gelu(m: Any, gate_up: torch.Tensor) -> Any:
    gate, up = halves(gate_up)
    return m.down(functional.gelu(gate) * up)


def up_is_activated(m: Any, gate_up: torch.Tensor) -> Any:
    gate, up = halves(gate_up)
    return m.down(functional.silu(up) * gate)


def gate_twice(m: Any, gate_up: torch.Tensor) -> Any:
    gate, _ = halves(gate_up)
    return m.down(functional.silu(gate) * gate)


def also_given(m: Any, gate_up: torch.Tensor) -> Any:
    gate, up = halves(gate_up)
    x = functional.silu(gate) * up
    return m.down(x), x


def other_rows(m: Any, gate_up: torch.Tensor) -> Any:
    gate, up = halves(gate_up)
    return m.narrow((functional.silu(gate) * up).reshape(-1, 64))


def added_to_its_product(m: Any, gate_up: torch.Tensor) -> Any:
    gate, up = halves(gate_up)
    x = functional.silu(gate) * up
    return x + m.square(x)


def halves_of_two(m: Any, gate_up: torch.Tensor) -> Any:
    gate, _ = halves(gate_up)
    _, up = halves(gate_up * 2)
    return m.down(functional.silu(gate) * up)


def unequal(m: Any, gate_up: torch.Tensor) -> Any:
    gate, up = gate_up.split((64, 192), -1)
    return m.narrow(functional.silu(gate) * up[..., :64])


def other_cube(m: Any, gate_up: torch.Tensor) -> Any:
    gate, up = halves(gate_up)
    wide = gate.float()
    bent = torch.tanh(0.7978845608028654 * (wide + 0.05 * wide * wide * wide))
    return m.down((0.5 * wide * (1 + bent)).to(BF16) * up)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (swiglu, {"silu": 1, "arranged": 1, "plain": 1}),
        (wide_sigmoid, {"silu": 1, "arranged": 1, "plain": 1}),
        (exact_gelu, {"plain": 2}),
        (up_is_activated, {"plain": 2}),
        (gate_twice, {"plain": 2}),
        (also_given, {"plain": 2}),
        (other_rows, {"plain": 2}),
        (added_to_its_product, {"residual": 1, "plain": 1}),
        (halves_of_two, {"plain": 2}),
        (unequal, {"plain": 2}),
        (other_cube, {"plain": 2}),
    ],
)
@torch.inference_mode()
def test_forms(function: Callable[..., Any], expected: dict[str, int]) -> None:
    module = Gated(function)
    h = torch.randn(3, 15, 64, dtype=BF16)
    wanted = module(h)
    with fusing(tile_rows=thirty_two) as graphs:
        found = compiled(module)(h)
    assert graphs == [expected]
    pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
    for one, other in pairs:
        assert close(one, other)


def test_compiled_code_is_kept_apart() -> None:
    assert FusedOperations(tile_rows=thirty_two).uuid() is None
