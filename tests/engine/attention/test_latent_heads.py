"""The matrices of latent attention, dense and in 4 bits, beside float64 arithmetic."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import quantize_4bit

from nf4_kernels import reference
from nf4_kernels.format import Weight
from server.engine.runtime.attention.base import AttentionOptions
from server.engine.runtime.attention.latent import DenseHeads, HeadSizes, LatentHeads
from server.engine.runtime.attention.latent_chunks import long_chunks
from server.engine.runtime.attention.packed_heads import PackedHeads
from server.engine.runtime.batch import Span, Spans

ROTARY = 8


def _heads(kind: str, sizes: HeadSizes, blocksize: int, nested: bool) -> tuple[LatentHeads, torch.Tensor]:
    """Heads of a random weight, and that in float64 [heads, plain + width, rank]."""
    torch.manual_seed(sizes.rank)
    rows = sizes.heads * (sizes.plain + sizes.width)
    table = "fp4" if kind == "fp4" else "nf4"
    packed, state = quantize_4bit(
        torch.randn(rows, sizes.rank), blocksize=blocksize, compress_statistics=nested, quant_type=table
    )
    weight = Weight.from_quant_state(packed, state, (table,))
    plain = reference.dequantize(weight, torch.float32)

    def project(latent: torch.Tensor) -> torch.Tensor:
        return latent @ plain.T

    heads = DenseHeads.of(plain, sizes, project) if kind == "dense" else PackedHeads(weight, sizes, project)
    return heads, plain.double().unflatten(0, (sizes.heads, -1))


@pytest.mark.parametrize("kind", ["dense", "nf4", "fp4"])
@pytest.mark.parametrize(
    ("sizes", "blocksize", "nested"),
    [
        (HeadSizes(3, 12, 20, 64), 64, True),
        (HeadSizes(5, 7, 9, 192), 64, False),
        (HeadSizes(20, 192, 256, 512), 64, True),
        (HeadSizes(2, 16, 16, 512), 256, False),
    ],
)
@pytest.mark.parametrize("tokens", [1, 5, 17])
def test_absorbed_and_expanded_as_float64(
    kind: str, sizes: HeadSizes, blocksize: int, nested: bool, tokens: int
) -> None:
    heads, weight = _heads(kind, sizes, blocksize, nested)
    keys, values = weight.split([sizes.plain, sizes.width], 1)
    # Heads before tokens in memory, as models hand them over.
    query = torch.randn(sizes.heads, tokens, sizes.plain + ROTARY).transpose(0, 1)
    absorbed = heads.absorbed(query)
    assert absorbed.dtype is torch.float32
    expected = torch.einsum("thn,hnr->thr", query[..., : sizes.plain].double(), keys)
    torch.testing.assert_close(absorbed[..., : sizes.rank].double(), expected, atol=2e-4, rtol=1e-4)
    assert torch.equal(absorbed[..., sizes.rank :], query[..., sizes.plain :])
    sums = torch.randn(tokens, sizes.heads, sizes.rank)
    expected = torch.einsum("thr,hvr->thv", sums.double(), values)
    torch.testing.assert_close(heads.values_of(sums).double(), expected, atol=2e-4, rtol=1e-4)
    latent = torch.randn(tokens, sizes.rank + ROTARY)
    found_keys, found_values = heads.expanded(latent)
    plain = torch.einsum("tr,hnr->thn", latent[:, : sizes.rank].double(), keys)
    torch.testing.assert_close(found_keys[..., : sizes.plain].double(), plain, atol=2e-4, rtol=1e-4)
    assert torch.equal(found_keys[..., sizes.plain :], latent[:, None, sizes.rank :].expand(-1, sizes.heads, -1))
    expected = torch.einsum("tr,hvr->thv", latent[:, : sizes.rank].double(), values)
    torch.testing.assert_close(found_values.double(), expected, atol=2e-4, rtol=1e-4)


def test_rows_that_are_no_whole_scale_blocks_are_not_read_in_4_bits() -> None:
    with pytest.raises(ValueError, match="rows of 32 are no whole scale blocks of 64"):
        _heads("nf4", HeadSizes(2, 16, 16, 32), 64, False)


def test_long_contexts_are_not_expanded() -> None:
    """A chunk of a thousand tokens pays for the expansion of a thousand, but not of millions, which would not fit."""
    heads, _ = _heads("dense", HeadSizes(2, 16, 16, 64), 64, False)
    assert heads.expands(1000, 1000)
    assert not heads.expands(2, 1000)
    assert not heads.expands(1000, 2**22)


@pytest.mark.parametrize(("length", "end"), [(300, 300), (260, 400)])
def test_long_chunks_attend_over_expanded_keys_and_values(length: int, end: int) -> None:
    """After the sequence's first tokens, whose latents are in the cache; other rows stay as they are."""
    sizes, block = HeadSizes(3, 12, 20, 64), 16
    heads, weight = _heads("dense", sizes, 64, False)
    latent = torch.randn(end, sizes.rank + ROTARY)
    cache = torch.full((40, 1, block, 1, sizes.rank + ROTARY), torch.nan)
    blocks = torch.randperm(40)[: -(-end // block)].int()
    at = torch.arange(end)
    cache[blocks[at // block].long(), 0, at % block, 0] = latent
    start = end - length
    spans = Spans.of([Span(0, 7, 1, [0]), Span(1, start, length, blocks.tolist())])
    query = torch.randn(1 + length, sizes.heads, sizes.plain + ROTARY)
    new = torch.cat((torch.zeros_like(latent[:1]), latent[start:])).unsqueeze(1)
    out = torch.zeros(1 + length, sizes.heads, sizes.width)
    tables = torch.zeros(2, 40, dtype=torch.int32)
    tables[1, : len(blocks)] = blocks
    found = long_chunks(spans, 1, heads, tables)
    assert list(found) == [1]
    found[1].attend(query, new, cache, heads, AttentionOptions(0.2), out)
    keys, values = weight.split([sizes.plain, sizes.width], 1)
    keys = torch.einsum("tr,hnr->htn", latent[:, : sizes.rank].double(), keys)
    keys = torch.cat((keys, latent[:, sizes.rank :].double().expand(sizes.heads, -1, -1)), -1)
    scores = torch.einsum("thd,hnd->htn", query[1:].double(), keys) * 0.2
    p = scores.masked_fill(at > at[start:, None], -torch.inf).softmax(-1)
    values = torch.einsum("tr,hvr->htv", latent[:, : sizes.rank].double(), values)
    torch.testing.assert_close(out[1:].double(), torch.einsum("htn,hnv->thv", p, values), atol=1e-3, rtol=1e-3)
    assert not out[0].any()
