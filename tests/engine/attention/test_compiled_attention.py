"""Decode attention by the compiled kernel: in every form beside float64, and which form a step takes."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch

from nf4_kernels.cuda import decode_attention as kernel
from nf4_kernels.cuda.decode_attention import MOST_PARTS, Instance, can_attend, decode_attention, instance_for
from nf4_kernels.reference import untile_activations
from server.engine.runtime.attention.base import AttentionOptions
from server.engine.runtime.attention.kernels.decode.attention import DecodeAttention
from server.engine.runtime.attention.kernels.decode.compiled_kernel import Rooms
from server.engine.runtime.attention.kernels.decode.key_parts import Room, split_keys
from server.engine.runtime.attention.kernels.kv_cache import Kind, LayerCache
from server.engine.runtime.attention.rotary import RotaryEmbedding
from server.engine.runtime.batch import Span, Spans

DEVICE = torch.device("cuda")
BLOCK, DIM = 16, 128
FEW = [Instance(8, 2, 1), Instance(4, 2, 2), Instance(4, 2, 3), Instance(2, 3, 4), Instance(1, 3, 8)]
MANY = [Instance(1, 3, 7), Instance(1, 3, 9), *(Instance(1, 2, blocks) for blocks in range(10, 14))]
on_hopper = pytest.mark.skipif(
    not can_attend(DEVICE, torch.bfloat16, BLOCK, 8, 8, DIM) if torch.cuda.is_available() else True,
    reason="needs a Hopper GPU",
)


def test_a_step_takes_the_form_by_its_thread_blocks() -> None:
    """On an H200 and with 8 key heads, and with 2, of which a multiprocessor has fewer."""
    assert [instance_for(n, 8, 132).per_processor for n in (1, 2, 16, 17, 33, 34, 49, 50, 82, 83, 512)] == [
        *(2, 1, 1, 2, 2, 3, 3, 4, 4, 8, 11),
    ]
    assert instance_for(64, 2, 132) == instance_for(16, 8, 132)
    assert {instance_for(n, 8, 132) for n in range(1, 600)} == {*FEW, *MANY}
    assert {(one.warps, one.stages) for one in kernel.INSTANCES} == {(one.warps, one.stages) for one in (*FEW, *MANY)}


def test_hundreds_of_sequences_are_few_full_waves() -> None:
    """With 8 key heads on an H200. The second number: the waves that these thread blocks make."""
    expected = {
        140: (9, 1),
        150: (10, 1),
        200: (13, 1),
        215: (7, 2),
        256: (8, 2),
        300: (10, 2),
        400: (13, 2),
        512: (11, 3),
    }
    for sequences, (per_processor, waves) in expected.items():
        form = instance_for(sequences, 8, 132)
        assert (form.per_processor, math.ceil(sequences * 8 / (132 * form.per_processor))) == (per_processor, waves)
        assert form.stages == (3 if per_processor <= 9 else 2)


def test_the_room_goes_by_the_kernel_that_attends() -> None:
    rooms = Rooms(132, [8, 4], [True, False], split=True)
    assert rooms.instance(0, 16, False) == Instance(8, 2, 1)
    assert rooms.instance(1, 16, False) is None
    assert rooms.instance(0, 16, True) is None
    assert rooms.of(16, False) == [Room(16, 17), Room(132, 132)]
    assert rooms.of(16, True) == [Room(66, 66), Room(132, 132)]
    assert rooms.most_spare == 215
    assert all(room.spare <= rooms.most_spare for n in range(1, 300) for room in rooms.of(n, False))
    whole = Rooms(132, [8], [True], split=False)
    assert whole.of(16, False) == [Room(16, 0)]
    assert whole.most_spare == 0


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_no_sequence_has_more_parts_than_the_kernel_reduces(kv_heads: int) -> None:
    """Long sequences beside many short ones, on ranks with few key heads; without the bound there would be more."""
    rooms = Rooms(132, [kv_heads], [True], split=True)
    chance = random.Random(kv_heads)
    most = unbounded = 0
    for size in (1, 16, 64, 128, 256, 384, 448, 512, 768, 1024):
        room = rooms.of(size, False)[0]
        for longest in (5000, 33_024, 101_376, 131_072, chance.randrange(1, 200_000)):
            lengths = np.array([longest, *(chance.choice((1, 64, 100)) for _ in range(size - 1))])
            most = max(most, int(split_keys(lengths, room, None).parts.max()))
            wide = Room(room.wave, Room.of(132, kv_heads, 8).spare)
            unbounded = max(unbounded, int(split_keys(lengths, wide, None).parts.max()))
    assert most <= MOST_PARTS
    assert (unbounded > MOST_PARTS) == (kv_heads < 8)


def test_other_devices_and_caches_are_not_for_the_kernel() -> None:
    assert not can_attend(torch.device("cpu"), torch.bfloat16, BLOCK, 8, 8, DIM)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"cache": torch.zeros(2, 2, 8, 2, DIM, dtype=torch.bfloat16)},
            r"must be contiguous \[blocks, 2, 16, 2, 128\]",
        ),
        ({"cache": torch.zeros(2, 2, BLOCK, 2, DIM)}, "must be float16 or bfloat16 alike, got torch.float32"),
        ({"query": torch.zeros(3, 18, DIM, dtype=torch.bfloat16)}, "18 query heads share 2 key heads; up to 8"),
        ({"key": torch.zeros(3, 2, 2 * DIM, dtype=torch.bfloat16)[..., ::2]}, "contiguous last dimension"),
    ],
)
def test_what_the_kernel_does_not_take_is_said(changed: dict[str, torch.Tensor], message: str) -> None:
    given = {
        "cache": torch.zeros(2, 2, BLOCK, 2, DIM, dtype=torch.bfloat16),
        "query": torch.zeros(3, 8, DIM, dtype=torch.bfloat16),
        "key": torch.zeros(3, 2, DIM, dtype=torch.bfloat16),
        "value": torch.zeros(3, 2, DIM, dtype=torch.bfloat16),
        **changed,
    }
    nothing = torch.zeros(0)
    layout = kernel.Layout(nothing.int(), 0, 0, 1, nothing.int())
    workspace = kernel.Workspace(nothing, nothing, nothing.int())
    with pytest.raises(ValueError, match=message):
        decode_attention(**given, out=nothing, layout=layout, workspace=workspace, instance=FEW[0], scaling=1.0)


def steps(lengths: list[int], seed: int) -> tuple[list[Span], int]:
    """Decode steps of sequences of these lengths in shuffled KV blocks, and the number of blocks with one of padding."""
    counts = [-(-length // BLOCK) for length in lengths]
    blocks = list(range(sum(counts)))
    random.Random(seed).shuffle(blocks)
    free = iter(blocks)
    spans = [
        Span(row, length - 1, 1, tuple(itertools.islice(free, count)))
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True))
    ]
    return spans, len(blocks) + 1


def expected_of(
    data: torch.Tensor,
    span: Span,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """A sequence's attention [heads, DIM] in float64; query [heads, DIM], key and value [kv_heads, DIM] of its new token."""
    kv_heads = key.shape[0]
    whole = data[list(span.blocks)].double()
    keys = whole[:, 0].reshape(-1, kv_heads, DIM)[: span.end].clone()
    values = whole[:, 1].reshape(-1, kv_heads, DIM)[: span.end].clone()
    keys[-1], values[-1] = key.double(), value.double()
    if options.window is not None:
        keys, values = keys[-options.window :], values[-options.window :]
    scores = torch.einsum("hgd,khd->hgk", query.double().view(kv_heads, -1, DIM), keys) * options.scaling
    return torch.einsum("hgk,khd->hgd", scores.softmax(-1), values).reshape(-1, DIM)


LENGTHS = [
    [1],
    [1, 2, 15, 16, 17, 31, 33, 64, 65, 127],
    [300] * 5,
    [4060, 4059],
    [9000, 5, 700],
    [20011],
    [150 + 3 * n for n in range(40)],
]


@on_hopper
@pytest.mark.parametrize("instance", [*FEW, *MANY[1::4]], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (64, 8), (28, 4), (16, 16), (6, 2)])
def test_every_form_beside_float64(
    monkeypatch: pytest.MonkeyPatch, instance: Instance, heads: int, kv_heads: int
) -> None:
    """Outputs, tiled or not, with rotary embedding, norms, windows or none of them; new keys and values; nothing else."""
    monkeypatch.setattr(kernel, "instance_for", lambda *_: instance)
    for number, lengths in enumerate(LENGTHS):
        for form, window in itertools.product(range(3), (None, 77)):
            dtype = torch.bfloat16 if (number + form) % 2 else torch.float16
            tile = (0, 16, 32)[(number + form) % 3] if heads * DIM % 256 == 0 else 0
            check(heads, kv_heads, lengths, form, window, dtype, tile)


def check(
    heads: int, kv_heads: int, lengths: list[int], form: int, window: int | None, dtype: torch.dtype, tile: int
) -> None:
    spans, blocks = steps(lengths, form)
    options = AttentionOptions(DIM**-0.5, window=window)
    kind, count = Kind(heads, kv_heads, DIM, options), len(lengths)
    decode = DecodeAttention([kind], count, max(len(s.blocks) for s in spans), blocks - 1, DEVICE, compiled=[kind])
    data = torch.full((blocks, 2, BLOCK, kv_heads, DIM), math.nan, device=DEVICE, dtype=dtype)
    for span in spans:
        for place in range(0, span.start, BLOCK):
            data[span.blocks[place // BLOCK], :, : min(BLOCK, span.start - place)].normal_()
    rows = torch.randn(count, heads + 2 * kv_heads, DIM, device=DEVICE).to(dtype)
    query, key, value = rows.split((heads, kv_heads, kv_heads), 1)
    rotary = None
    if form:
        angles = torch.randn(count, DIM // 2, device=DEVICE).repeat(1, 2)
        norms = torch.rand(2, DIM, device=DEVICE).to(dtype)
        weights = (norms[0], norms[1]) if form == 2 else None
        rotary = RotaryEmbedding(angles.cos().to(dtype), angles.sin().to(dtype), weights, 1e-5, form - 1.0)
    turned = (query, key) if rotary is None else rotary.apply(query, key)
    cache = LayerCache(data.clone(), None)
    partials = decode._partials
    for buffer in (partials.sums, partials.weights):
        buffer.fill_(math.nan)
    decode.plan(Spans.of(spans), count)
    found = decode.attend(cache, query, key, value, options, rotary, tile)
    untiled = untile_activations(found, count, heads * DIM).view(count, heads, DIM) if tile else found
    wanted = torch.stack(
        [expected_of(data, s, turned[0][i], turned[1][i], value[i], options) for i, s in enumerate(spans)]
    )
    error = (untiled.double() - wanted).norm() / wanted.norm()
    assert error < (4e-3 if dtype is torch.bfloat16 else 1e-3), (lengths, form, window, float(error))
    blocks_of = torch.tensor([s.blocks[s.start // BLOCK] for s in spans], device=DEVICE)
    offsets = torch.tensor([s.start % BLOCK for s in spans], device=DEVICE)
    assert torch.equal(cache.data[blocks_of, 1, offsets], value)
    if rotary is None:
        assert torch.equal(cache.data[blocks_of, 0, offsets], key)
    else:
        torch.testing.assert_close(cache.data[blocks_of, 0, offsets], turned[1], atol=1e-6, rtol=1e-2)
    written = cache.data[blocks_of, 0, offsets].clone()
    cache.data[blocks_of, :, offsets] = data[blocks_of, :, offsets]
    assert torch.equal(cache.data.nan_to_num(9.0), data.nan_to_num(9.0))
    for _ in range(3):
        again = decode.attend(cache, query, key, value, options, rotary, tile)
        assert torch.equal(
            again if not tile else untile_activations(again, count, heads * DIM),
            untiled.view_as(again if not tile else untiled.flatten(1)),
        )
    assert torch.equal(cache.data[blocks_of, 0, offsets], written)
    assert not partials.arrived.any()


@on_hopper
def test_a_graph_goes_on_by_itself() -> None:
    """The step behind one that was laid out, with the kernel in a CUDA graph: beside float64 for 40 tokens."""
    heads, kv_heads, lengths = 32, 8, [1, 15, 700, 2047]
    options = AttentionOptions(DIM**-0.5)
    kind = Kind(heads, kv_heads, DIM, options)
    spans, blocks = steps([length + 48 for length in lengths], 3)
    spans = [Span(s.row, length - 1, 1, s.blocks) for s, length in zip(spans, lengths, strict=True)]
    decode = DecodeAttention([kind], 4, 200, blocks - 1, DEVICE, compiled=[kind])
    data = torch.randn(blocks, 2, BLOCK, kv_heads, DIM, device=DEVICE).bfloat16()
    rows = torch.randn(4, heads + 2 * kv_heads, DIM, device=DEVICE).bfloat16()
    query, key, value = rows.split((heads, kv_heads, kv_heads), 1)
    decode.plan(Spans.of(spans), 4)
    cache = LayerCache(data.clone(), None)
    decode.attend(cache, query, key, value, options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = decode.attend(cache, query, key, value, options)
    inputs = torch.zeros(3, 4, dtype=torch.int64, device=DEVICE)
    for moved in range(40):
        if moved:
            assert decode.advance(inputs, torch.zeros(4, dtype=torch.int64, device=DEVICE), BLOCK)
        rows.normal_()
        before = cache.data.clone()
        graph.replay()
        now = [Span(s.row, s.start + moved, 1, s.blocks) for s in spans]
        wanted = torch.stack([expected_of(before, s, query[i], key[i], value[i], options) for i, s in enumerate(now)])
        assert (found.double() - wanted).norm() / wanted.norm() < 4e-3, moved
