"""The start's trial of the compiled attention, with the kernel's work done by torch: what is laid out for each form."""

from __future__ import annotations

import pytest

from tests.engine.interpreted import run_interpreted

TRIAL = """
import types
import torch
from nf4_kernels.cuda import decode_attention as kernel
from server.engine.runtime.attention.base import AttentionOptions, LayerShape
from server.engine.runtime.attention.kernels.decode.attention import DecodeAttention
from server.engine.runtime.attention.kernels.decode.trial import disagreement
from server.engine.runtime.attention.kernels.kv_cache import Kind
from server.engine.runtime.attention.rotary import RotaryEmbedding
from server.engine.runtime.attention.sdpa import SdpaBackend

torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(multi_processor_count=132)
CPU = torch.device("cpu")
seen, wrong = [], [None]


def attend(cache, query, key, value, out, layout, workspace, instance, scaling, rotation=None, tile=0):
    # Each item's keys by themselves, then a sequence's items together, as the kernel reduces them.
    seen.append(instance)
    if rotation is not None:
        query, key = RotaryEmbedding(
            rotation.cos, rotation.sin, rotation.norms, rotation.eps, rotation.offset
        ).apply(query, key)
    numbers = layout.numbers[layout.first :].view(-1, kernel.ITEM_FIELDS).tolist()
    count = int(layout.numbers[layout.counted])
    assert count <= layout.items
    parts = {}
    for index in range(count):
        row, begin, end, newest, first, of, table, _ = numbers[index]
        assert first <= index < first + of <= count
        assert of <= kernel.MOST_PARTS
        blocks = layout.tables[table].long()
        if end > newest:
            place = blocks[newest // 16], slice(None), newest % 16
            cache[place] = torch.stack((key[row], value[row]))
        at = torch.arange(begin, end)
        keys, values = cache[blocks[at // 16], 0, at % 16].double(), cache[blocks[at // 16], 1, at % 16].double()
        own = query[row].double().view(key.shape[1], -1, 128)
        scores = torch.einsum("hgd,khd->hgk", own, keys) * scaling
        parts.setdefault(row, []).append((scores, values, begin, end))
    for row, own in parts.items():
        assert [part[2] for part in own[1:]] == [part[3] for part in own[:-1]]
        p = torch.cat([part[0] for part in own], -1).softmax(-1)
        found = torch.einsum("hgk,khd->hgd", p, torch.cat([part[1] for part in own])).flatten(0, 1)
        out[row] = found.to(out.dtype) + (1 if instance == wrong[0] else 0)


kernel.decode_attention = attend


def found(window=None, kv_heads=8):
    options = AttentionOptions(128**-0.5, window=window)
    kinds = [Kind(2 * kv_heads, kv_heads, 128, o) for o in (options, AttentionOptions(128**-0.5, window=50))]
    decode = DecodeAttention(kinds, 48, 200, 30, CPU, compiled=kinds)
    reference = SdpaBackend([LayerShape(kv_heads, 128, 128, 2 * kv_heads)], 30, 16, torch.float32, CPU)
    cache = torch.zeros(31, 2, 16, kv_heads, 128)
    reference._keys[0], reference._values[0] = cache[:, 0], cache[:, 1]
    seen.clear()
    said = disagreement(decode, reference, cache, 0, kinds[0])
    assert decode.forms(kinds[0]) == list(kernel.INSTANCES)
    assert decode._rooms.form is None
    return said


"""


@pytest.mark.parametrize("given", ["", "window=77", "kv_heads=2"])
def test_every_form_is_tried_and_lays_out_all_keys(given: str) -> None:
    pytest.importorskip("triton")
    run_interpreted(
        TRIAL + f"said = found({given})\nassert said is None, said\nassert set(seen) == set(kernel.INSTANCES), seen\n"
    )


def test_a_form_that_differs_is_named() -> None:
    pytest.importorskip("triton")
    run_interpreted(
        TRIAL
        + "wrong[0] = kernel.Instance(2, 3, 4)\n"
        + "said = found()\nassert said.endswith('(Instance(warps=2, stages=3, per_processor=4))'), said\n"
    )
