"""Caches in 8 bits: their bytes, where they are refused, and how a step's chunks are laid out for the kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from server.config import EngineConfig, KVCacheDtype
from server.engine.runtime.attention.base import AttentionOptions, LayerShape, UnsupportedModelError
from server.engine.runtime.attention.factory import check_cache_dtype
from server.engine.runtime.attention.kernels import chunk_items
from server.engine.runtime.attention.kernels.decode.key_parts import Room, split_keys
from server.engine.runtime.attention.kernels.kv_cache import LayerCache, bytes_per_token, stored_dtype
from server.engine.runtime.preparation.assembly import build_runner
from tests.engine.models import tiny_model

CPU = torch.device("cpu")


def test_the_bytes_of_a_token_are_those_of_the_cache() -> None:
    shape = LayerShape(4, 128, 128, 32)
    for name, activations in (("auto", torch.bfloat16), ("int8", torch.bfloat16), ("fp8_e4m3", torch.float16)):
        dtype = stored_dtype(name, activations)  # type: ignore[arg-type]
        cache = LayerCache.zeros(shape, 3, 16, dtype, CPU)
        stored = cache.data.nbytes + (0 if cache.scales is None else cache.scales.nbytes)
        assert bytes_per_token(shape, dtype) * 3 * 16 == stored


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_cpus_refuse_8_bits_by_name(name: KVCacheDtype) -> None:
    given = [LayerShape(2, 64, 64, 4)], [AttentionOptions(0.1)], 16, torch.float32, CPU
    with pytest.raises(UnsupportedModelError, match=rf"engine\.kv_cache_dtype: {name} cannot be used: it needs CUDA"):
        check_cache_dtype(name, *given)
    check_cache_dtype("auto", *given)


def test_a_start_on_cpu_says_so() -> None:
    with pytest.raises(UnsupportedModelError, match=r"engine\.kv_cache_dtype: int8"):
        build_runner(tiny_model("llama"), EngineConfig(device="cpu", kv_cache_dtype="int8"))


def test_8_bits_and_batch_invariance_exclude_one_another() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype has to be auto with batch_invariant"):
        EngineConfig(kv_cache_dtype="int8", batch_invariant=True)


def test_keys_are_not_split_where_a_batch_may_not_change_a_sequence() -> None:
    items = split_keys(np.array([9000, 1, 64, 700]), Room(66, 0), None)
    assert items.parts.tolist() == [1, 1, 1, 1]
    assert items.end.tolist() == [9000, 1, 64, 700]


def test_every_token_of_a_chunk_is_in_one_item() -> None:
    lengths, starts = np.array([1, 33, 64, 7]), np.array([500, 0, 31, 8000])
    rows = lengths.cumsum() - lengths
    numbers = chunk_items.layout(rows, lengths, starts, np.array([4, 3, 2, 1]), 32)
    assert numbers[0, 0] == len(numbers) - 1 <= chunk_items.most_items(int(lengths.sum()), 4, 32)
    found = sorted(
        (row + i, start + i, table) for row, count, start, table, *_ in numbers[1:].tolist() for i in range(count)
    )
    expected = [
        (row + i, start + i, table)
        for row, count, start, table in zip(rows.tolist(), lengths.tolist(), starts.tolist(), [4, 3, 2, 1], strict=True)
        for i in range(count)
    ]
    assert found == expected
    assert numbers[1:, 2].tolist() == sorted(numbers[1:, 2].tolist(), reverse=True)
    assert numbers[1:, 4:7].tolist() == [[0, start + count, 1] for _, count, start, *_ in numbers[1:].tolist()]


def test_keys_of_few_items_are_split() -> None:
    lengths, starts = np.array([40, 33]), np.array([30000, 0])
    room = chunk_items.chunk_room(132, 4)
    numbers = chunk_items.layout(lengths.cumsum() - lengths, lengths, starts, np.array([1, 2]), 32, room)
    assert len(numbers) - 1 <= min(room.wave + room.spare, chunk_items.most_items(73, 2, 32, room))
    by_tokens: dict[tuple[int, int], list[list[int]]] = {}
    for row, count, start, _, begin, end, parts, _ in numbers[1:].tolist():
        by_tokens.setdefault((row, start + count), []).append([begin, end, parts])
    assert sorted(end for _, end in by_tokens) == [32, 33, 30032, 30040]
    for (_, last), of_tokens in by_tokens.items():
        assert [parts for *_, parts in of_tokens] == [len(of_tokens)] * len(of_tokens)
        assert [begin for begin, *_ in of_tokens] == [0, *(end for _, end, _ in of_tokens[:-1])]
        assert of_tokens[-1][1] == last
        assert len(of_tokens) > 8 or last < 40
    assert len(chunk_items.layout(lengths * 0, lengths * 32, starts, np.array([1, 2]), 32, room)) == 74


@pytest.mark.parametrize(
    ("tokens", "start", "parts"), [(992, 30000, 2), (992, 0, 1), (700, 30000, 3), (1500, 30000, 1)]
)
def test_items_of_like_lengths_fill_whole_waves(tokens: int, start: int, parts: int) -> None:
    """Qwen3.5-27B on an H200: 33 items are a wave, and 48 would take the time of 66."""
    room, zero = chunk_items.chunk_room(132, 4), np.array([0])
    numbers = chunk_items.layout(zero, zero + tokens, zero + start, zero, 21, room)
    items = -(-tokens // 21)
    assert len(numbers) - 1 == items * parts <= chunk_items.most_items(tokens, 1, 21, room)
    assert parts == 1 or items * parts <= room.wave + room.spare
    assert set(numbers[1:, 6].tolist()) == {parts}
