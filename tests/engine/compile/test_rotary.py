"""Attention that computes rotary embeddings and norms: where it does, where not, and the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb, rotate_half

from nf4_kernels.reference import tile_activations
from server.engine.runtime.attention.base import AttentionBackend, AttentionOptions
from server.engine.runtime.attention.calls import ATTEND_ROTARY, IMPLEMENTATION, attending
from server.engine.runtime.attention.rotary import RotaryEmbedding
from server.engine.runtime.batch import Batch
from server.engine.runtime.compile.passes.fusion import FusedOperations
from tests.engine.compile.complex_rotary import rotated
from tests.engine.compile.fusing import BF16, always, close, compiled, fusing
from tests.engine.compile.test_fusion import logits, nf4_model

Heads = torch.Tensor


class Uncached(AttentionBackend):
    """Attention to the tokens of the pass alone, in float32."""

    def begin(self, batch: Batch) -> None:
        pass

    def attend(self, layer: int, query: Heads, key: Heads, value: Heads, options: AttentionOptions) -> torch.Tensor:
        return self.attend_next(query, key, value)

    def attend_next(self, query: Heads, key: Heads, value: Heads) -> torch.Tensor:
        wide = (x.float().transpose(0, 1) for x in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
        return out.transpose(0, 1).to(query.dtype).contiguous()


@pytest.mark.parametrize("tokens", [5, 1])
@pytest.mark.parametrize(
    ("family", "norms"), [("llama", 0), ("mistral", 0), ("qwen2", 0), ("qwen3", 0), ("gemma2", 4), ("gemma3_text", 4)]
)
@torch.inference_mode()
def test_attention_computes_the_rotary_embedding_of(family: str, norms: int, tokens: int) -> None:
    """The norms that are left are those around GEMMs."""
    own = {"layer_types": ["full_attention"]} if family.startswith("gemma") else {}
    model = nf4_model(family, **own)
    model.set_attn_implementation(IMPLEMENTATION)
    layer = model.get_decoder().layers[0]
    with attending(Uncached()):
        wanted = logits(model, tokens)
        layer.forward = compiled(layer.forward)
        with fusing(applies_rotary=True) as graphs:
            found = logits(model, tokens)
    (counts,) = graphs
    assert (counts["rotary"], counts["attend"], counts["rsqrt"]) == (1, 0, norms)
    assert close(found, wanted)


class Attending(nn.Module):
    """Queries and keys of 2 heads of 16, out of one tensor, made by function(self, q, k, cos, sin), and attention."""

    def __init__(self, function: Callable[..., tuple[Heads, Heads]]) -> None:
        super().__init__()
        self.function = function
        self.norm, self.other_norm = LlamaRMSNorm(16, 0.3), LlamaRMSNorm(16, 0.1)
        for norm in (self.norm, self.other_norm):
            norm.to(BF16).requires_grad_(False).weight.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [1, T, 96], cos and sin [1, T, 16]."""
        heads = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in x.split(32, -1))
        query, key, value = heads
        query, key = self.function(self, query, key, cos, sin)
        rows = (t[0].transpose(0, 1) for t in (query, key, value))
        out: torch.Tensor = torch.ops.nf4_server.attend(*rows)
        return out


def normed(m: Any, q: Heads, k: Heads, cos: Heads, sin: Heads) -> tuple[Heads, Heads]:
    return apply_rotary_pos_emb(m.norm(q), m.norm(k), cos, sin)


def one_norm(m: Any, q: Heads, k: Heads, cos: Heads, sin: Heads) -> tuple[Heads, Heads]:
    return apply_rotary_pos_emb(m.norm(q), k, cos, sin)


def different_norms(m: Any, q: Heads, k: Heads, cos: Heads, sin: Heads) -> tuple[Heads, Heads]:
    return apply_rotary_pos_emb(m.norm(q), m.other_norm(k), cos, sin)


def queries_only(m: Any, q: Heads, k: Heads, cos: Heads, sin: Heads) -> tuple[Heads, Heads]:
    return apply_rotary_pos_emb(q, k, cos, sin)[0], k


def other_angles_for_keys(m: Any, q: Heads, k: Heads, cos: Heads, sin: Heads) -> tuple[Heads, Heads]:
    return apply_rotary_pos_emb(q, k, cos, sin)[0], apply_rotary_pos_emb(q, k, sin, cos)[1]


def half_of_a_head(m: Any, q: Heads, k: Heads, cos: Heads, sin: Heads) -> tuple[Heads, Heads]:
    turned = apply_rotary_pos_emb(q[..., :8], k[..., :8], cos[..., :8], sin[..., :8])
    return torch.cat((turned[0], q[..., 8:]), -1), torch.cat((turned[1], k[..., 8:]), -1)


def neighbours(m: Any, q: Heads, k: Heads, cos: Heads, sin: Heads) -> tuple[Heads, Heads]:
    def turn(x: Heads) -> Heads:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos[:, None] + turned * sin[:, None]

    return turn(q), turn(k)


def other_way_round(m: Any, q: Heads, k: Heads, cos: Heads, sin: Heads) -> tuple[Heads, Heads]:
    def turn(x: Heads) -> Heads:
        turned = torch.cat((x[..., 8:], -x[..., :8]), -1)
        return x * cos[:, None] + turned * sin[:, None]

    return turn(q), turn(k)


def uneven_halves(m: Any, q: Heads, k: Heads, cos: Heads, sin: Heads) -> tuple[Heads, Heads]:
    def turn(x: Heads) -> Heads:
        turned = torch.cat((-x[..., 6:], x[..., :6]), -1)
        return x * cos[:, None] + turned * sin[:, None]

    return turn(q), turn(k)


def of_another(m: Any, q: Heads, k: Heads, cos: Heads, sin: Heads) -> tuple[Heads, Heads]:
    def turn(x: Heads, y: Heads) -> Heads:
        return x * cos[:, None] + rotate_half(y) * sin[:, None]

    return turn(q, k), turn(k, q)


def float32_angles(m: Any, q: Heads, k: Heads, cos: Heads, sin: Heads) -> tuple[Heads, Heads]:
    return tuple(x.to(BF16) for x in apply_rotary_pos_emb(q, k, cos.float(), sin.float()))  # type: ignore[return-value]


def same_angles_for_all_tokens(m: Any, q: Heads, k: Heads, cos: Heads, sin: Heads) -> tuple[Heads, Heads]:
    return apply_rotary_pos_emb(q, k, cos[:, :1], sin[:, :1])


def strided_angles(m: Any, q: Heads, k: Heads, cos: Heads, sin: Heads) -> tuple[Heads, Heads]:
    both = torch.cat((cos, sin), -1)
    return apply_rotary_pos_emb(q, k, both[..., ::2], both[..., 1::2])


def computed_weight(m: Any, q: Heads, k: Heads, cos: Heads, sin: Heads) -> tuple[Heads, Heads]:
    def norm(x: Heads) -> Heads:
        wide = x.float()
        return (m.norm.weight * 2) * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 0.3)).to(BF16)

    return apply_rotary_pos_emb(norm(q), norm(k), cos, sin)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (normed, {"rotary": 1}),
        (one_norm, {"attend": 1, "rsqrt": 1}),
        (different_norms, {"attend": 1, "rsqrt": 2}),
        (computed_weight, {"attend": 1, "rsqrt": 2}),
        *(
            (function, {"attend": 1})
            for function in (
                queries_only,
                other_angles_for_keys,
                half_of_a_head,
                neighbours,
                other_way_round,
                uneven_halves,
                of_another,
                float32_angles,
                same_angles_for_all_tokens,
                strided_angles,
            )
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@torch.inference_mode()
def test_only_what_the_kernel_computes_is_fused(
    function: Callable[..., tuple[Heads, Heads]], expected: dict[str, int]
) -> None:
    torch.manual_seed(0)
    module = Attending(function)
    inputs = [torch.randn(1, 7, size).to(BF16) for size in (96, 16, 16)]
    with attending(Uncached()), fusing(applies_rotary=True) as graphs:
        wanted = module(*inputs)
        assert close(compiled(module)(*inputs), wanted)
    assert graphs == [+Counter(expected)]


@torch.inference_mode()
def test_nothing_is_fused_where_attention_does_not_compute_it() -> None:
    inputs = [torch.randn(1, 7, size).to(BF16) for size in (96, 16, 16)]
    with attending(Uncached()), fusing() as graphs:
        compiled(Attending(normed))(*inputs)
    assert graphs == [{"attend": 1, "rsqrt": 2}]


def test_compiled_code_is_kept_apart() -> None:
    assert FusedOperations(applies_rotary=True).uuid() != FusedOperations().uuid()
    assert FusedOperations(always, applies_rotary=True).uuid() is None


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
def test_torchs_rotary_embedding_is_that_of_complex_numbers(dtype: torch.dtype, offset: float | None) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(3, 4, 16, dtype=dtype), torch.randn(3, 2, 16, dtype=dtype)
    angles = torch.randn(3, 8).repeat(1, 2)
    norms = None if offset is None else (torch.rand(16).to(dtype), torch.rand(16).to(dtype))
    rotary = RotaryEmbedding(angles.cos().to(dtype), angles.sin().to(dtype), norms, 0.1, offset or 0.0)
    for place, (x, found) in enumerate(zip((query, key), rotary.apply(query, key), strict=True)):
        assert found.dtype == dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), rotated(x, rotary, place), atol=4 * eps, rtol=eps)


@pytest.mark.parametrize("tokens", [1, 16, 35])
@pytest.mark.parametrize("tile", [16, 32])
def test_attention_gives_tiles_of_its_rows(tile: int, tokens: int) -> None:
    args = rotated_arguments(tokens, heads=8)
    with attending(Uncached()):
        rows = ATTEND_ROTARY(*args)
        assert rows.shape == (tokens, 8, 32)
        assert torch.equal(ATTEND_ROTARY(*args, tile), tile_activations(rows.flatten(1), tile))
        torch.library.opcheck(ATTEND_ROTARY, (*args, tile), test_utils=("test_schema", "test_faketensor"))


def test_tiles_of_columns_that_do_not_fill_them_are_refused() -> None:
    with attending(Uncached()), pytest.raises(ValueError, match=r"heads \* dim is 6 \* 32.* 256"):
        ATTEND_ROTARY(*rotated_arguments(3, heads=6), 16)


def rotated_arguments(tokens: int, heads: int) -> tuple[Any, ...]:
    """attend_rotary's arguments but for tile, for heads of 32 without norms."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(tokens, count, 32).to(BF16) for count in (heads, 2, 2))
    angles = torch.randn(tokens, 16).repeat(1, 2)
    return query, key, value, angles.cos().to(BF16), angles.sin().to(BF16), None, None, 0.0, 0.0
