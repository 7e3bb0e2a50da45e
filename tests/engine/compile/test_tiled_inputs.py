"""GEMMs that read tiled activations, written by the GEMM or the attention in front: where they do, and where not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from server.engine.runtime.attention.calls import IMPLEMENTATION, attending
from server.engine.runtime.compile.passes.fusion import FusedOperations
from server.engine.runtime.model.projections import NF4Linear
from tests.engine.compile.fusing import BF16, close, compiled, fusing, nf4
from tests.engine.compile.test_fusion import logits, nf4_model
from tests.engine.compile.test_rotary import Uncached

SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
}


def thirty_two(*_: object) -> int:
    return 32


@pytest.mark.parametrize(
    ("family", "tokens", "tile", "width"),
    [
        *((family, 40, 64, 256) for family in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")),
        ("llama", 5, 32, 256),
        ("gemma3_text", 64, 32, 256),
        ("llama", 40, 64, 192),
        ("gemma3_text", 40, 64, 192),
    ],
)
@torch.inference_mode()
def test_a_layer_of(family: str, tokens: int, tile: int, width: int) -> None:
    """A gated activation stays untiled where it would not fill the tiles."""
    gemma = family.startswith("gemma")
    sizes = SIZES | {"intermediate_size": width}
    model = nf4_model(family, **sizes, **({"layer_types": ["full_attention"]} if gemma else {}))
    model.set_attn_implementation(IMPLEMENTATION)
    layer = model.get_decoder().layers[0]
    with attending(Uncached()):
        wanted = logits(model, tokens)
        layer.forward = compiled(layer.forward)
        with fusing(applies_rotary=True, tile_of=lambda *_: tile) as graphs:
            found = logits(model, tokens)
    if gemma:
        first, rows, tiled, gates = "plain", "plain", "tiled", "gelu_tanh"
    else:
        first, rows, tiled, gates = "norm", "residual", "tiled residual", "norm silu"
    pair = [f"{gates} tiled", tiled] if width % 256 == 0 else [gates, rows]
    assert graphs[0] == +Counter({"rotary": 1, "rsqrt": 4 * gemma}) + Counter([first, tiled, *pair])
    assert close(found, wanted)


@torch.inference_mode()
def test_only_gemms_with_such_a_launch() -> None:
    """Attention writes tiles only where heads * dim is a multiple of 256."""
    asked: list[tuple[Any, ...]] = []

    def tile_of(*question: Any) -> int:
        asked.append(question)
        return 0 if question[3] == [64, 96] else 32

    model = nf4_model("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    layer = model.get_decoder().layers[0]
    with attending(Uncached()):
        layer.forward = compiled(layer.forward)
        with fusing(applies_rotary=True, tile_of=tile_of) as graphs:
            logits(model, 7)
    assert graphs == [{"norm": 1, "norm silu": 1, "residual": 2, "rotary": 1}]
    assert asked == [
        (torch.device("cpu"), BF16, 7, shape, 64, nested) for shape, nested in [([64, 64], True), ([64, 96], True)]
    ]


class Chained(nn.Module):
    """function(self, h, gated): GEMMs behind a gated activation that another GEMM computes."""

    def __init__(self, function: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.gate_up, self.down, self.square = (
            NF4Linear.of(nf4(64, 512)),
            NF4Linear.of(nf4(256, 64)),
            NF4Linear.of(nf4(256, 256)),
        )
        self.narrow, self.wide = NF4Linear.of(nf4(128, 64)), NF4Linear.of(nf4(512, 64))

    def forward(self, h: torch.Tensor) -> Any:
        gate, up = self.gate_up(h).split((256, 256), -1)
        return self.function(self, h, functional.silu(gate) * up)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda m, h, x: m.down(x), {"silu tiled": 1, "tiled": 1}),
        (lambda m, h, x: m.down(x.reshape(45, 256)), {"silu tiled": 1, "tiled": 1}),
        (lambda m, h, x: m.down(x.reshape(15, 3, 256)), {"silu tiled": 1, "tiled": 1}),
        (lambda m, h, x: h + m.down(x), {"silu tiled": 1, "tiled residual": 1}),
        (lambda m, h, x: m.narrow(x.reshape(-1, 128)), {"silu": 1, "plain": 1}),
        (lambda m, h, x: m.wide(x[:, :14].reshape(-1, 512)), {"silu": 1, "plain": 1}),
        (lambda m, h, x: m.down(x[:, ::2].contiguous()), {"silu": 1, "plain": 1}),
        (lambda m, h, x: m.down(x * 2), {"silu": 1, "plain": 1}),
        (lambda m, h, x: (m.down(x), m.square(x)), {"silu": 1, "plain": 2}),
        (lambda m, h, x: (m.down(x.reshape(45, 256)), x), {"silu": 1, "plain": 1}),
        (lambda m, h, x: x + m.square(x), {"silu": 1, "residual": 1}),
        (lambda m, h, x: x.reshape(45, 256) + m.square(x.reshape(45, 256)), {"silu": 1, "residual": 1}),
    ],
)
@torch.inference_mode()
def test_gemms_behind_a_gated_activation(function: Callable[..., Any], expected: dict[str, int]) -> None:
    module = Chained(function)
    h = torch.randn(3, 15, 64, dtype=BF16)
    wanted = module(h)
    with fusing(tile_of=thirty_two) as graphs:
        found = compiled(module)(h)
    assert graphs == [expected]
    pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
    for one, other in pairs:
        assert close(one, other)


def test_compiled_code_is_kept_apart() -> None:
    assert FusedOperations(tile_of=thirty_two).uuid() is None
