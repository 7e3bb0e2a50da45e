"""Attention by our Triton kernels beside the reference in float32: one-token sequences and chunks in one step, caches of
16 and 8 bits, decode steps and mixed steps as graphs lay them out."""

from __future__ import annotations

import pytest
import torch

from server.engine.runtime.attention.base import AttentionOptions, LayerShape
from server.engine.runtime.attention.paged_cuda import CudaBackend
from server.engine.runtime.batch import Batch, Span, Spans
from tests.engine.attention.paged_steps import BLOCK, CAPPED, DEVICE, FP8, PLAIN, WINDOW, check, make_batch

pytestmark = pytest.mark.gpu

CACHES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.int8),
    pytest.param(torch.bfloat16, torch.float8_e4m3fn, marks=FP8),
    (torch.float16, torch.int8),
]


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES)
@pytest.mark.parametrize("options", [PLAIN, WINDOW, CAPPED])
@pytest.mark.parametrize(
    ("shape", "earlier", "now"),
    [
        (LayerShape(2, 128, 128, 8), [699, 40, 100, 0, 3], [700, 41, 400, 513, 8]),
        (LayerShape(2, 128, 128, 14), [0, 1000], [150, 1300]),
        (LayerShape(3, 64, 64, 15), [15, 16, 17, 0], [16, 17, 18, 1]),
        (LayerShape(1, 256, 256, 1), [5, 0, 62], [6, 129, 66]),
        (LayerShape(2, 512, 512, 16), [5, 0, 340, 62], [6, 129, 341, 66]),
        # Few tokens behind many: their keys are split.
        (LayerShape(4, 128, 128, 24), [9000, 5, 0], [9060, 6, 33]),
    ],
)
def test_a_step_attends_as_the_reference(
    shape: LayerShape,
    options: AttentionOptions,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    earlier: list[int],
    now: list[int],
) -> None:
    for graph in ("", "mixed"):
        check(shape, options, dtype, cache_dtype, earlier, now, graph)


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES)
@pytest.mark.parametrize(
    ("shape", "options", "lengths"),
    [
        (LayerShape(8, 128, 128, 32), PLAIN, [9000, 1, 2, 64, 65]),
        (LayerShape(4, 128, 128, 28), CAPPED, [600, 299, 300, 301]),
        (LayerShape(3, 64, 64, 9), WINDOW, [*range(1, 140, 5), 1024]),
        (LayerShape(2, 256, 256, 10), PLAIN, [17, 1000, 16]),
        (LayerShape(2, 512, 512, 16), PLAIN, [9000, 1, 63, 64, 65]),
        (LayerShape(1, 512, 512, 16), WINDOW, [700, 3]),
        (LayerShape(2, 512, 512, 8), CAPPED, [299, 600]),
    ],
)
def test_a_decode_graph_attends_as_the_reference(
    shape: LayerShape, options: AttentionOptions, dtype: torch.dtype, cache_dtype: torch.dtype, lengths: list[int]
) -> None:
    check(shape, options, dtype, cache_dtype, [n - 1 for n in lengths], lengths, "decode")


def test_a_graph_of_fewer_tokens_may_have_more_sequences_than_the_one_captured_first() -> None:
    tested = CudaBackend([LayerShape(4, 256, 256, 24)], [PLAIN], 2000, BLOCK, torch.bfloat16, DEVICE)
    tested.set_up_graphs(1024, 256, True)
    tested.plan_mixed_graph(Spans.of([]), 1024, 8)
    spans = Spans.of([Span(3 * i, 0, 3, (i,)) for i in range(170)])
    numbers, most = next(iter(tested.plan_mixed_graph(spans, 512, 256).chunks.values()))
    assert int(numbers[0, 0]) == 170 <= most < len(numbers)


def test_tables_that_graphs_read_stay_where_they_are() -> None:
    tested = CudaBackend([LayerShape(4, 256, 256, 24)], [PLAIN], 2000, BLOCK, torch.bfloat16, DEVICE)
    tested.set_up_graphs(4096, 8, True)
    held = tested._decode
    tested.plan_mixed_graph(Spans.of([]), 8192, 8)
    tested.plan_decode_graph(Spans.of([Span(0, 4095, 1, range(4096 // BLOCK))]), 8)
    assert tested._decode is held
    for spans in ([Span(0, 4096, 1, range(4096 // BLOCK + 1))], [Span(row, 0, 1, (row,)) for row in range(9)]):
        with pytest.raises(RuntimeError, match="graphs have room for 8 sequences of 256 KV blocks"):
            tested.begin(Batch(*[torch.zeros(len(spans), dtype=torch.int64)] * 4, Spans.of(spans), len(spans)))


@pytest.mark.parametrize("cache_dtype", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=FP8)])
@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        (LayerShape(2, 128, 128, 32), [700, 64, 3]),
        (LayerShape(1, 64, 64, 12), [129, 5000]),
        (LayerShape(1, 128, 128, 48), [300, 65]),
    ],
)
def test_a_decode_graph_takes_up_to_16_queries_of_a_key_by_warps_and_more_together(
    shape: LayerShape, lengths: list[int], cache_dtype: torch.dtype
) -> None:
    check(shape, PLAIN, torch.bfloat16, cache_dtype, [n - 1 for n in lengths], lengths, "decode")


@pytest.mark.parametrize("cache_dtype", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=FP8)])
@pytest.mark.parametrize("factors", [(1e9, 1e-3, 1e-9), (1e-9, 1e3, 1e6)])
def test_magnitudes_may_be_beyond_those_of_float16(
    factors: tuple[float, float, float], cache_dtype: torch.dtype
) -> None:
    options = AttentionOptions(0.09 / factors[0] / factors[1])
    lengths = [700, 64, 3, 2000]
    check(
        LayerShape(4, 128, 128, 16),
        options,
        torch.bfloat16,
        cache_dtype,
        [n - 1 for n in lengths],
        lengths,
        "decode",
        factors,
    )


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES)
@pytest.mark.parametrize(
    ("shape", "options", "earlier", "now"),
    [
        (LayerShape(8, 128, 128, 32), PLAIN, [8996, 13, 63, 64, 0], [9000, 20, 66, 65, 3]),
        (LayerShape(4, 128, 128, 28), CAPPED, [600, 298, 15], [608, 302, 17]),
        (LayerShape(3, 64, 64, 9), WINDOW, [61, 200, 1024, 1], [69, 204, 1025, 4]),
        (LayerShape(2, 512, 512, 16), PLAIN, [3000, 13, 63, 0], [3008, 20, 66, 3]),
    ],
)
def test_tokens_of_one_sequence_see_each_other_in_a_shared_graph(
    shape: LayerShape,
    options: AttentionOptions,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    earlier: list[int],
    now: list[int],
) -> None:
    check(shape, options, dtype, cache_dtype, earlier, now, "shared")


@pytest.mark.parametrize("dim", [256, 512])
def test_long_heads_on_gpus_with_little_shared_memory(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of GPUs whose thread blocks may have 99 KB; without programmatic dependent launches."""
    for name, value in (("capability", (8, 6)), ("arch", 86)):
        monkeypatch.setattr(
            f"server.engine.runtime.attention.kernels.chunk_kernel.{name}", lambda _, value=value: value
        )
    for graph in ("", "mixed"):
        check(LayerShape(2, dim, dim, 16), PLAIN, torch.bfloat16, torch.bfloat16, [5, 0, 90], [6, 129, 260], graph)


def test_without_splitting_a_sequence_has_the_same_bits_in_any_batch() -> None:
    shape, lengths = LayerShape(2, 128, 128, 8), [3000, 5, 700, 1999]
    tested = CudaBackend([shape], [PLAIN], 400, BLOCK, torch.int8, DEVICE)
    tested.set_up_graphs(3000, 4, False)
    tables = [tuple(range(100 * i, 100 * i + 100)) for i in range(4)]
    tables[0] = tuple(range(200, 388))
    batch = make_batch([(0, lengths[0])], [tables[0]])
    tested.begin(batch)
    made = [torch.randn(3000, heads, 128, device=DEVICE, dtype=torch.bfloat16) for heads in (8, 2, 2)]
    tested.attend(0, *made, PLAIN)
    results = []
    for others in ([], [1], [1, 1, 1]):
        pieces = [(2999, 3000), *((n - 1, n) for n in others)]
        step = make_batch(pieces, [tables[0], *(((390 + i,)) for i in range(len(others)))])
        tested.plan_decode_graph(step.spans, 4)
        padded = torch.cat((step.slots, torch.full((4 - len(pieces),), 400 * BLOCK, device=DEVICE)))
        tested.begin_decode_graph(padded)
        rows = [x[-4:].clone() for x in made]
        for x in rows:
            x[0] = x[-1]
        results.append(tested.attend(0, *rows, PLAIN)[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
