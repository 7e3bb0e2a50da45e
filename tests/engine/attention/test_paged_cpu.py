"""Our C++ attention, with and without AMX, beside float64 arithmetic, on random caches, chunks and shapes."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nf4_kernels import cpu
from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.attention.base import AttentionOptions, LayerShape
from server.engine.runtime.attention.factory import create_backend
from server.engine.runtime.attention.paged_cpu import PagedCpuBackend, paged_cpu_error
from server.engine.runtime.batch import Batch, Span, Spans
from server.engine.runtime.preparation.assembly import build_runner
from tests.engine.factories import make_request, run_together, tokens
from tests.engine.models import tiny_model
from tests.marks import with_rest

SIZE = 16
BLOCKS = 400


@pytest.fixture(autouse=True)
def _usable() -> None:
    reason = paged_cpu_error()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(params=["amx", "vectors"])
def tolerance(request: pytest.FixtureRequest) -> Iterator[float]:
    """The error of one query's output, beside the output's norm, that the chosen instructions may make."""
    if cpu.load_error() is not None:
        if request.param == "amx":
            pytest.skip("nf4_kernels does not say whether this CPU runs AMX")
        yield 2e-5
        return
    before = cpu.isa()
    try:
        cpu.set_isa("amx" if request.param == "amx" else "portable")
    except ValueError as e:
        pytest.skip(str(e))
    yield 1e-4 if request.param == "amx" else 2e-5
    cpu.set_isa(before)


def _batch(chunks: list[tuple[int, int]], rng: random.Random, size: int = SIZE) -> Batch:
    """Sequences (start, length), those of one token first, in random blocks."""
    blocks = BLOCKS * SIZE // size
    free = rng.sample(range(blocks), blocks)
    spans, slots, row = [], [], 0
    for start, length in chunks:
        table = tuple(free.pop() for _ in range(-(-(start + length) // size)))
        spans.append(Span(row, start, length, table))
        slots += [table[p // size] * size + p % size for p in range(start, start + length)]
        row += length
    rows = torch.arange(row)
    singles = sum(length == 1 for _, length in chunks)
    return Batch(rows, rows, torch.tensor(slots), rows[-1:], Spans.of(spans), singles)


def _exact(
    batch: Batch,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    how: AttentionOptions,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The batch's attention in float64 over the cache [blocks, size, kv_heads, dim] as it lies after writing."""
    group = query.shape[1] // keys.shape[2]
    outputs = []
    for span in batch.spans:
        blocks = list(span.blocks)
        key, value = (
            cache[blocks].flatten(0, 1)[: span.end].double().repeat_interleave(group, 1) for cache in (keys, values)
        )
        rows = query[span.row : span.row + span.end - span.start].double()
        scores = torch.einsum("qhd,khd->hqk", rows, key) * how.scaling
        if how.softcap is not None:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        behind = torch.arange(span.start, span.end)[:, None] - torch.arange(span.end)
        hidden = behind < 0
        if how.window is not None:
            hidden |= behind >= how.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)), -1)
        shares = scores.softmax(-1)[..., : span.end]
        outputs.append(torch.einsum("hqk,khd->qhd", shares, value))
    return torch.cat(outputs)


CASES = [
    ([(0, 2)], {}),
    ([(0, 47), (0, 48), (0, 49), (0, 200)], {}),
    ([(9, 1), (300, 1), (256, 256), (0, 33)], {}),
    ([(1000, 130), (63, 2), (64, 65)], {}),
    ([(0, 300), (500, 70), (40, 1)][::-1], {"window": 50}),
    ([(200, 200), (3, 5)], {"window": 1}),
    ([(100, 129)], {"window": 64}),
    ([(37, 1), (100, 100), (0, 61)], {"softcap": 20.0}),
    ([(90, 100)], {"softcap": 5.0, "window": 33}),
    ([(i * 7, 3 + i * 5) for i in range(12)], {"window": 130}),
    ([(9, 1), (0, 1), (300, 1), (256, 256), (0, 33)], {"sinks": True}),
    ([(37, 1), (100, 100), (0, 61)], {"softcap": 20.0, "window": 33, "sinks": True}),
]


def _check(chunks: list[tuple[int, int]], shape: LayerShape, how: AttentionOptions, size: int, most: float) -> None:
    """Attends over random numbers; no query's error may be more than `most` of its output's norm."""
    torch.manual_seed(shape.heads + size)
    blocks = BLOCKS * SIZE // size
    backend = PagedCpuBackend([shape], [how], blocks, size, torch.device("cpu"))
    if how.sinks:
        backend.sinks = {0: torch.randn(shape.heads) * 5}
    batch = _batch(sorted(chunks, key=lambda c: c[1] > 1), random.Random(shape.heads), size)
    backend._keys[0].normal_()
    if not shape.is_latent:
        backend._values[0].normal_()
    keys, values = backend._keys[0].clone(), backend._values[0].clone()
    # Heads before tokens in memory, as models hand them over; large scores, as they come from real weights.
    query = torch.randn(shape.heads, batch.num_tokens, shape.key_dim).transpose(0, 1) * 3
    key = torch.randn(shape.kv_heads, batch.num_tokens, shape.key_dim).transpose(0, 1)
    value = torch.randn(batch.num_tokens, shape.kv_heads, shape.value_dim)
    if shape.is_latent:
        value = key[..., : shape.value_dim]
    backend.begin(batch)
    out = backend.attend(0, query, key, value, how)
    keys.flatten(0, 1)[batch.slots] = key
    values.flatten(0, 1)[batch.slots] = value
    assert torch.equal(backend._keys[0], keys)
    assert torch.equal(backend._values[0], values)
    exact = _exact(batch, query, keys, values, how, backend.sinks.get(0))
    errors = (out - exact).norm(dim=-1) / exact.norm(dim=-1)
    worst = errors.max().item()
    assert worst <= most


# Heads of keys, dimensions of keys and of values, heads of queries; each case with half of them.
SHAPES = [(3, 64, 64, 9), (4, 80, 80, 4), (2, 96, 96, 4), (1, 128, 128, 8), (1, 33, 20, 2), (2, 256, 256, 14)]
PLACES = [(i, j) for i in range(len(SHAPES)) for j in range(len(CASES)) if (i + j) % 2 == 0]


@pytest.mark.parametrize(("shape", "case"), with_rest(PLACES, lambda place: place[1] % len(SHAPES) == place[0]))
def test_attends_as_float64(shape: int, case: int, tolerance: float) -> None:
    sizes, (chunks, options) = SHAPES[shape], CASES[case]
    _check(chunks, LayerShape(*sizes), AttentionOptions(sizes[1] ** -0.5, **options), SIZE, tolerance)


@pytest.mark.parametrize("threads", [2, 3])
def test_sequences_are_divided_among_threads(threads: int, tolerance: float) -> None:
    torch.set_num_threads(threads)  # the fixture of all tests sets it back
    for chunks, options in (CASES[1], CASES[2], CASES[9]):
        _check(chunks, LayerShape(2, 64, 64, 4), AttentionOptions(0.125, **options), SIZE, tolerance)


LATENT_SHAPES = [(1, 144, 128, 4), (1, 33, 20, 5), (1, 40, 40, 19)]
LATENT_PAIRS = [(shape, case) for i, shape in enumerate(LATENT_SHAPES) for case in CASES[i::3]]


@pytest.mark.parametrize(("shape", "case"), LATENT_PAIRS)
def test_latents_attend_as_float64(
    shape: tuple[int, int, int, int], case: tuple[list[tuple[int, int]], dict[str, Any]], tolerance: float
) -> None:
    """Values are the first columns of the one key, which the cache keeps once."""
    chunks, options = case
    how = AttentionOptions(shape[1] ** -0.5, **options)
    _check(chunks, LayerShape(*shape, is_latent=True), how, SIZE, tolerance)


def test_latents_of_the_sizes_that_models_have(tolerance: float) -> None:
    _check([(40, 1), (0, 33)], LayerShape(1, 576, 512, 20, is_latent=True), AttentionOptions(0.06), SIZE, tolerance)


@pytest.mark.parametrize(("group", "size"), [(i, (1, 8, 32, 100)[i % 4]) for i in range(1, 9)])
def test_groups_of_heads_and_sizes_of_blocks(group: int, size: int, tolerance: float) -> None:
    rng = random.Random(group * size)
    chunks = [(rng.randrange(200), rng.randrange(2, 150)) for _ in range(3)]
    shape = LayerShape(2, 64, 64, 2 * group)
    _check(chunks, shape, AttentionOptions(0.125, rng.choice([None, 40, 64])), size, tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models_attend_in_float32(dtype: torch.dtype) -> None:
    """Keys and values are kept in float32, and only the results are rounded."""
    shape, how = LayerShape(2, 64, 64), AttentionOptions(0.125)
    batch = _batch([(0, 1), (0, 33)], random.Random(0))
    query, key, value = (torch.randn(batch.num_tokens, heads, 64).to(dtype) for heads in (4, 2, 2))
    outs = []
    for inputs in ((query, key, value), (query.float(), key.float(), value.float())):
        backend = create_backend([shape], [how], BLOCKS, SIZE, inputs[0].dtype, torch.device("cpu"))
        assert isinstance(backend, PagedCpuBackend)
        backend.begin(batch)
        outs.append(backend.attend(0, *inputs, how))
    assert outs[0].dtype is dtype
    assert torch.equal(outs[0], outs[1].to(dtype))


@pytest.mark.parametrize("eager", [True, False])
def test_a_model_in_bfloat16_runs_on_it(eager: bool, caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(device="cpu", kv_cache_bytes=2**20, max_num_batched_tokens=16, enforce_eager=eager)
    model = tiny_model("llama").bfloat16()
    reference = copy.deepcopy(model)
    runner = build_runner(model, config)
    assert isinstance(runner._paged.backend, PagedCpuBackend)
    assert "SDPA" not in caplog.text
    # 3 layers, 2 heads of 16, keys and values in float32: 768 bytes a token.
    assert runner.limits.num_blocks * config.block_size <= 2**20 // 768
    request = make_request([5, 9, 60, 7], max_tokens=6, ignore_eos=True, logprobs=1)
    outputs = run_together(Engine(runner, config), request)[request.request_id]
    ids = [5, 9, 60, 7]
    for token, entry in zip(tokens(outputs), (e for output in outputs for e in output.logprobs or ()), strict=True):
        wanted = reference(torch.tensor([ids]), use_cache=False).logits[0, -1].float().log_softmax(-1)
        assert abs(float(wanted[token]) - entry.logprob) < 0.05
        ids.append(token)
