"""Attention on CUDA against the reference in float32: one-token sequences and chunks in one step, the latter by our own
kernel and by FlashInfer's, and decode steps; shuffled blocks."""

from __future__ import annotations

import importlib.util
import itertools
import random

import pytest
import torch

from nf4_kernels.cuda.device import capability
from nf4_kernels.reference import untile_activations
from server.engine.runtime.attention import paged_cuda
from server.engine.runtime.attention.base import AttentionBackend, AttentionOptions, LayerShape
from server.engine.runtime.attention.flashinfer.prefill import LONG_CHUNKS, _loaded, load_in_background
from server.engine.runtime.attention.kernels.decode.attention import DecodeAttention
from server.engine.runtime.attention.kernels.kv_cache import Kind, LayerCache
from server.engine.runtime.attention.paged_cuda import CudaBackend
from server.engine.runtime.attention.rotary import RotaryEmbedding
from server.engine.runtime.attention.sdpa import SdpaBackend
from server.engine.runtime.batch import Batch, Span, Spans
from tests.engine.attention.complex_rotary import rotated
from tests.engine.attention.paged_steps import BLOCK, CAPPED, DEVICE, PLAIN, make_batch

pytestmark = pytest.mark.gpu
FLASHINFER = pytest.mark.skipif(not importlib.util.find_spec("flashinfer"), reason="needs FlashInfer")

SHAPES = [LayerShape(2, 128, 128, 8)] * 4
OPTIONS = [
    AttentionOptions(128**-0.5),
    AttentionOptions(0.1, window=64),
    AttentionOptions(0.1, window=64, sinks=True),
    AttentionOptions(128**-0.5, sinks=True),
]


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ([699, 40, 100, 0, 3], [700, 41, 400, 513, 8]),
        ([0, 1000], [700, 1300]),
        ([15, 16, 17], [16, 17, 18]),
        ([5, 0], [6, LONG_CHUNKS - 1]),
        ([5, 0], [6, LONG_CHUNKS]),
    ],
)
@pytest.mark.parametrize("by_flashinfer", [False, pytest.param(True, marks=FLASHINFER)])
@torch.inference_mode()
def test_a_step_attends_as_the_reference(earlier: list[int], now: list[int], by_flashinfer: bool) -> None:
    """earlier, now: tokens of each sequence before and after the step."""
    torch.manual_seed(0)
    blocks = list(range(200))
    random.Random(1).shuffle(blocks)
    free = iter(blocks)
    tables = [tuple(itertools.islice(free, -(-end // BLOCK))) for end in now]
    tested = CudaBackend(SHAPES, OPTIONS, len(blocks), BLOCK, torch.bfloat16, DEVICE)
    if by_flashinfer:
        loading = load_in_background(tested._kinds, BLOCK, torch.bfloat16, DEVICE, tested._use)
        assert loading is not None
        loading.join()
        assert tested._prefill is not None
        assert [tested._prefill.takes(kind) for kind in tested._kinds] == [True, False, False, False]
    reference = SdpaBackend(SHAPES, len(blocks), BLOCK, torch.float32, DEVICE)
    tested.sinks = reference.sinks = {layer: torch.randn(8, device=DEVICE) * 3 for layer in (2, 3)}
    before = [i for i, end in enumerate(earlier) if end > 0]
    # The tokens before, as a step of their own, and then the step.
    for pieces, sequences in (
        ([(0, earlier[i]) for i in before], before),
        (list(zip(earlier, now, strict=True)), range(len(now))),
    ):
        batch = make_batch(pieces, [tables[i] for i in sequences])
        rows = batch.slots.shape[0]
        for backend in (tested, reference):
            backend.begin(batch)
        for layer, options in enumerate(OPTIONS):
            query, key, value = (
                torch.randn(rows, heads, 128, device=DEVICE, dtype=torch.bfloat16) for heads in (8, 2, 2)
            )
            found = attend(tested, layer, query, key, value, options)
            expected = attend(reference, layer, query.float(), key.float(), value.float(), options)
            assert (found - expected).abs().max() < 0.03, f"layer {layer}"


@FLASHINFER
@torch.inference_mode()
def test_a_step_that_waits_for_the_device_keeps_its_plan_while_the_next_one_is_planned() -> None:
    """As on a GPU that computes something else, too: the host is two steps ahead of it."""
    kind = Kind.of(SHAPES[0], OPTIONS[0])
    prefill = _loaded([kind], BLOCK, torch.bfloat16, DEVICE)
    cache = torch.randn(200, 2, BLOCK, 2, 128, device=DEVICE).to(torch.bfloat16)
    blocks = iter(range(200))
    steps = []
    for lengths in ([900], [40] * 9 + [500]):
        tables = [tuple(itertools.islice(blocks, -(-length // BLOCK))) for length in lengths]
        query = torch.randn(sum(lengths), 8, 128, device=DEVICE).to(torch.bfloat16)
        steps.append((make_batch([(0, length) for length in lengths], tables).spans, query))

    def attend_steps(wait: bool) -> list[torch.Tensor]:
        found = []
        for spans, query in steps:
            found.append(torch.full_like(query, float("nan")))
            prefill.plan(spans, 0)
            prefill.attend(kind, query, cache, found[-1])
            if wait:
                torch.cuda.synchronize()
        return found

    alone = attend_steps(wait=True)
    busy = torch.randn(8192, 8192, device=DEVICE)
    for _ in range(10):
        busy @ busy
    assert all(map(torch.equal, attend_steps(wait=False), alone))


SINKS = AttentionOptions(0.125, window=128, sinks=True)


@pytest.mark.parametrize(
    ("shape", "options", "dtype", "lengths"),
    [
        (LayerShape(8, 128, 128, 64), PLAIN, torch.bfloat16, [1]),
        (LayerShape(8, 128, 128, 64), PLAIN, torch.bfloat16, [255]),
        (LayerShape(8, 128, 128, 32), PLAIN, torch.bfloat16, [9000]),
        (LayerShape(8, 128, 128, 64), CAPPED, torch.bfloat16, [6000, 1, 300, 301, 299]),
        (LayerShape(3, 64, 64, 9), PLAIN, torch.bfloat16, [*range(1, 140, 5), 1024, 80, 81, 64, 65, 3000]),
        (LayerShape(2, 256, 256, 10), CAPPED, torch.float16, [17, 1000, 16]),
        (LayerShape(1, 128, 128, 48), PLAIN, torch.float16, [700, 20]),
        (LayerShape(16, 128, 128, 16), AttentionOptions(0.1, window=1), torch.bfloat16, [500, 3]),
        (LayerShape(8, 64, 64, 64), SINKS, torch.bfloat16, [1, 300, 9000, 128, 129]),
        (LayerShape(8, 64, 64, 64), AttentionOptions(0.125, sinks=True), torch.bfloat16, [1, 300, 9000]),
    ],
)
def test_a_decode_step_attends_as_the_reference(
    shape: LayerShape, options: AttentionOptions, dtype: torch.dtype, lengths: list[int]
) -> None:
    check_decode(shape, options, dtype, lengths, None)


@pytest.mark.parametrize(
    ("shape", "options", "dtype", "lengths", "norms", "offset"),
    [
        (LayerShape(8, 128, 128, 64), PLAIN, torch.bfloat16, [255, 1, 9000], True, 0.0),
        (LayerShape(8, 128, 128, 64), PLAIN, torch.bfloat16, [64], False, 0.0),
        (LayerShape(16, 128, 128, 32), CAPPED, torch.bfloat16, [301, 65, 2], True, 1.0),
        (LayerShape(3, 64, 64, 36), PLAIN, torch.float16, [*range(1, 140, 5), 3000], False, 0.0),
        (LayerShape(8, 128, 128, 64), PLAIN, torch.bfloat16, [*range(1, 290, 8), 5000], True, 0.0),
        (LayerShape(2, 256, 256, 10), CAPPED, torch.float16, [17, 1000, 16], True, 1.0),
    ],
)
def test_a_decode_step_normalises_and_rotates(
    shape: LayerShape, options: AttentionOptions, dtype: torch.dtype, lengths: list[int], norms: bool, offset: float
) -> None:
    """Tiled, too: sequences of one part and of several, in one tile and in several."""
    angles = torch.randn(len(lengths), shape.key_dim // 2, device=DEVICE).repeat(1, 2)
    weights = torch.rand(2, shape.key_dim, device=DEVICE).add(0.5 - offset).to(dtype).unbind()
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    check_decode(
        shape, options, dtype, lengths, RotaryEmbedding(cos, sin, weights if norms else None, 0.1, offset), (16, 32)
    )


def check_decode(
    shape: LayerShape,
    options: AttentionOptions,
    dtype: torch.dtype,
    lengths: list[int],
    rotary: RotaryEmbedding | None,
    tiles: tuple[int, ...] = (),
) -> None:
    spans, used = shuffled(lengths)
    kinds = [Kind(shape.heads, shape.kv_heads, shape.key_dim, o) for o in (AttentionOptions(1.0, window=77), options)]
    decode = DecodeAttention(kinds, len(lengths), max(len(s.blocks) for s in spans), 0, DEVICE)
    reference = SdpaBackend([shape], used, BLOCK, torch.float32, DEVICE)
    sinks = torch.randn(shape.heads, device=DEVICE) * 3 if options.sinks else None
    reference.sinks = {} if sinks is None else {0: sinks}
    # What is not yet written is not a number, here and in memory that the kernel uses for itself.
    cache = torch.full((used, 2, BLOCK, shape.kv_heads, shape.key_dim), torch.nan, dtype=dtype, device=DEVICE)
    partials = decode._partials
    for buffer in (partials.sums, partials.weights):
        buffer.fill_(torch.nan)
    for span in spans:
        for place in range(span.start):
            cache[span.blocks[place // BLOCK], :, place % BLOCK].normal_()
    reference._keys[0].copy_(cache[:, 0].nan_to_num())
    reference._values[0].copy_(cache[:, 1].nan_to_num())
    count = len(lengths)
    # They have different strides, as views of a projection's output.
    heads = shape.heads + 2 * shape.kv_heads
    rows = torch.randn(count, heads, shape.key_dim, device=DEVICE).to(dtype)
    query, key, value = rows.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    slots = torch.tensor([s.blocks[-1] * BLOCK + s.start % BLOCK for s in spans], device=DEVICE)
    reference.begin(Batch(slots, slots, slots, slots, Spans.of(spans), count))
    turned = (query, key) if rotary is None else [rotated(x, rotary, i) for i, x in enumerate((query, key))]
    expected = reference.attend(0, turned[0].float(), turned[1].float(), value.float(), options)
    decode.plan(Spans.of(spans), count)
    found = decode.attend(LayerCache(cache, None), query, key, value, options, rotary, sinks=sinks)
    assert (found - expected).abs().max() < (0.03 if dtype is torch.bfloat16 else 0.005)
    keys, values = cache.transpose(1, 2).flatten(0, 1)[slots].unbind(1)
    assert torch.equal(values, value)
    # Rounded once.
    torch.testing.assert_close(keys.double(), turned[1].double(), atol=1e-6, rtol=torch.finfo(dtype).eps / 1.99)
    assert not partials.arrived.any()
    for _ in range(20):
        assert torch.equal(
            decode.attend(LayerCache(cache, None), query, key, value, options, rotary, sinks=sinks), found
        )
    width = shape.heads * shape.key_dim
    for tile in tiles:
        # Freed at once: the next tensor of its size lies there.
        torch.full((-(-count // tile), width // 64, tile, 64), torch.nan, dtype=dtype, device=DEVICE)
        tiled = decode.attend(LayerCache(cache, None), query, key, value, options, rotary, tile, sinks)
        assert torch.equal(untile_activations(tiled, count, width), found.flatten(1))


def shuffled(lengths: list[int]) -> tuple[list[Span], int]:
    """Decode steps of sequences of these lengths in shuffled KV blocks, and the number of blocks."""
    counts = [-(-length // BLOCK) for length in lengths]
    blocks = list(range(sum(counts)))
    random.Random(2).shuffle(blocks)
    free = iter(blocks)
    return [
        Span(row, length - 1, 1, tuple(itertools.islice(free, count)))
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True))
    ], len(blocks)


@pytest.mark.skipif(
    torch.cuda.is_available() and capability(DEVICE) != (9, 0), reason="the compiled kernel is Hopper's"
)
def test_a_decode_kernel_that_differs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shapes, options = SHAPES[:2], OPTIONS[:2]
    backend = CudaBackend(shapes, options, 40, BLOCK, torch.bfloat16, DEVICE)
    backend.set_up_graphs(640, 4, split_keys=True)
    assert backend._compiled
    monkeypatch.setattr(paged_cuda, "disagreement", lambda decode, *_: "off by 1.0" if backend._compiled else None)
    backend.set_up_graphs(640, 4, split_keys=True)
    assert not backend._compiled
    assert "decode steps attend by Triton's kernel, more slowly" in caplog.text
    monkeypatch.setattr(paged_cuda, "disagreement", lambda *_: "off by 1.0")
    with pytest.raises(RuntimeError, match="decode steps cannot attend: ValueError: off by"):
        backend.set_up_graphs(640, 4, split_keys=True)


def attend(
    backend: AttentionBackend,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    return backend.attend(layer, query, key, value, options).float()
