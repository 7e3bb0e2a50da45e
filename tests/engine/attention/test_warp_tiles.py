"""The decode kernel over a KV cache in 8 bits, in Triton's interpreter, and its conversions as the GPU executes them."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.engine.compiled import run_compiled
from tests.engine.interpreted import run_interpreted

pytest.importorskip("triton")

_Words = npt.NDArray[np.uint32]


def _byte(x: _Words, y: _Words, place: int) -> _Words:
    """prmt's byte `place` of the eight in x and y."""
    return ((x if place < 4 else y) >> np.uint32(8 * (place % 4))) & np.uint32(0xFF)


def _halves(x: _Words) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(x).view(np.float16).reshape(-1, 2)


def _executed(assembly: str, words: _Words) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """$0 and $1, [words, 2], as PTX leaves them whose $2 is words. Raises KeyError at an instruction that is not known."""
    registers = {"$2": words}

    def value(name: str) -> _Words:
        return registers[name] if name in registers else np.full_like(words, int(name, 0))

    def permuted(x: str, y: str, selector: str) -> _Words:
        places = [int(selector, 0) >> 4 * i & 7 for i in range(4)]
        made = [_byte(value(x), value(y), place) << np.uint32(8 * i) for i, place in enumerate(places)]
        return np.bitwise_or.reduce(made)

    def subtracted(x: str, y: str) -> _Words:
        return (_halves(value(x)) - _halves(value(y))).view(np.uint32).reshape(-1)

    def widened(x: str) -> _Words:
        bytes_ = np.stack((_byte(value(x), value(x), 0), _byte(value(x), value(x), 1)), 1).astype(np.uint8)
        wide = torch.from_numpy(bytes_).view(torch.float8_e4m3fn).to(torch.float16)
        return wide.numpy().view(np.uint32).reshape(-1)

    known = {
        "xor.b32": lambda x, y: value(x) ^ value(y),
        "mov.b32": value,
        "prmt.b32": permuted,
        "sub.f16x2": subtracted,
        "cvt.rn.f16x2.e4m3x2": widened,
    }
    for line in assembly.strip("{}").replace("\n", "").split(";"):
        if not line or line.startswith(".reg"):
            continue
        if pair := re.fullmatch(r"mov.b32 {(\w+), (\w+)}, (\w+)", line):
            whole = value(pair[3])
            registers[pair[1]], registers[pair[2]] = whole & np.uint32(0xFFFF), whole >> np.uint32(16)
            continue
        name, operands = line.split(" ", 1)
        target, *sources = operands.split(", ")
        registers[target] = known[name](*sources)
    return _halves(registers["$0"]), _halves(registers["$1"])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_the_gpus_conversion_of_every_value_is_exact(dtype: torch.dtype) -> None:
    from server.engine.runtime.attention.kernels import warp_tiles

    codes = np.arange(256, dtype=np.uint8)
    # Each code in each of the four places, beside random others.
    bytes_ = np.random.default_rng().integers(0, 256, (4, 256, 4), dtype=np.uint8)
    for place in range(4):
        bytes_[place, :, place] = codes
    bytes_ = bytes_.reshape(-1, 4)
    assembly = warp_tiles._FROM_INT8 if dtype == torch.int8 else warp_tiles._FROM_E4M3
    even, odd = _executed(assembly.value, bytes_.view(np.uint32).reshape(-1))
    expected = torch.from_numpy(bytes_).view(dtype).to(torch.float32).numpy()
    assert np.array_equal(even.astype(np.float32), expected[:, 0::2], equal_nan=True)
    assert np.array_equal(odd.astype(np.float32), expected[:, 1::2], equal_nan=True)


# A sequence's keys and values as the cache has them, a step of the kernel, and the same in float64. The newest token of a
# sequence has 16 bits.
DECODE = """
import math
import numpy as np
import torch
from server.engine.runtime.attention.base import AttentionOptions, LayerShape
from server.engine.runtime.attention.kernels.decode.attention import FIELDS, HEADER, layout
from server.engine.runtime.attention.kernels.decode.key_parts import Room
from server.engine.runtime.attention.kernels.decode.triton_kernel import Partials, attend_newest
from server.engine.runtime.attention.kernels.kv_cache import LayerCache
from server.engine.runtime.trials import relative_error

# The interpreter runs on a CPU.
torch.cuda.get_device_capability = lambda device=None: (8, 0)
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def stored(x, dtype):
    largest = x.abs().amax(-1).clamp(min=1e-30)
    scaled = x * (LIMITS[dtype] / largest)[..., None]
    return (torch.floor(scaled + 0.5) if dtype == torch.int8 else scaled).to(dtype), largest / LIMITS[dtype]


def check(dtype, cache_dtype, group, dim, lengths, window=None, cap=None, sinks=None, factors=(1, 1, 1), room=6):
    torch.manual_seed(0)
    kv_heads, size = 2, 16
    options = AttentionOptions(0.3 / factors[0] / factors[1], window=window, softcap=cap)
    per = -(-max(lengths) // size) + 1
    blocks = torch.randperm(len(lengths) * per).to(torch.int32).view(len(lengths), per)
    shape = LayerShape(kv_heads, dim, dim, kv_heads * group)
    cache = LayerCache.zeros(shape, len(lengths) * per, size, cache_dtype, torch.device("cpu"))
    assert cache.data.stride(3) > cache.data.stride(2)  # its heads lie one after another
    query, key, value = (
        (torch.randn(len(lengths), heads, dim) * factor).to(dtype)
        for heads, factor in zip((kv_heads * group, kv_heads, kv_heads), factors)
    )
    expected = []
    for i, length in enumerate(lengths):
        wide = []
        for part, newest, factor in ((0, key[i], factors[1]), (1, value[i], factors[2])):
            x = torch.randn(length, kv_heads, dim) * factor
            # Values of one sequence differ by a factor of up to 1000, and one of them is all zeros.
            if part == 1:
                x *= 10 ** (3 * torch.rand(length, kv_heads, 1) - 3)
                x[length // 2] = 0
            data, scales = stored(x, cache_dtype)
            for place in range(length - 1):
                block = blocks[i, place // size]
                cache.data[block, part, place % size] = data[place]
                cache.scales[block, part, :, place % size] = scales[place]
            wide.append((data.double() * scales.double()[..., None]))
            wide[-1][-1] = newest.double()
        scores = torch.einsum("hgd,nhd->hgn", query[i].double().view(kv_heads, group, dim), wide[0]) * options.scaling
        if cap:
            scores = cap * (scores / cap).tanh()
        if window:
            scores[..., : max(0, length - window)] = -math.inf
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().view(kv_heads, group, 1)), -1)
        p = scores.softmax(-1)[..., :length]
        expected.append(torch.einsum("hgn,nhd->hgd", p, wide[1]).flatten(0, 1))
    room = Room(room, room)
    numbers = torch.from_numpy(layout(np.array(lengths), np.arange(len(lengths)), [window], [room]))
    items = (len(numbers) - HEADER) // FIELDS
    partials = Partials(items, kv_heads, kv_heads * group, dim, torch.device("cpu"))
    found = attend_newest(
        cache, query, key, value, numbers, HEADER, 0, items, blocks, partials, options, None, sinks=sinks
    )
    for i, length in enumerate(lengths):
        error = relative_error(found[i], expected[i])
        # The interpreter rounds a result down to bfloat16, by up to 2^-7 of itself.
        assert error < (0.006 if dtype == torch.bfloat16 else 0.0005), (dtype, cache_dtype, length, factors, error)
        place = blocks[i, (length - 1) // size], (length - 1) % size
        for part, newest in ((0, key[i]), (1, value[i])):
            data, scales = stored(newest.float(), cache_dtype)
            written = cache.data[place[0], part, place[1]].float() - data.float()
            # Nor does it round to e4m3 as torch does; the two largest numbers are 64 away from the next but one.
            assert written.abs().max() <= (1 if cache_dtype == torch.int8 else 64)
            assert torch.allclose(cache.scales[place[0], part, :, place[1]], scales)


"""
CHUNK = """
import numpy as np
import torch
from server.engine.runtime.attention.base import AttentionOptions, LayerShape
from server.engine.runtime.attention.kernels import chunk_items
from server.engine.runtime.attention.kernels.chunk_kernel import PartialSums, attend_chunks, tokens_per_item
from server.engine.runtime.attention.kernels.decode.key_parts import Room
from server.engine.runtime.attention.kernels.kv_cache import Kind, LayerCache
from server.engine.runtime.attention.kernels.kv_write import quantize_kv
from server.engine.runtime.trials import relative_error

torch.cuda.get_device_capability = lambda device=None: (8, 6)
torch.manual_seed(0)
kv_heads, group, size, tokens, start = 2, 3, 16, 390, 330
cache = LayerCache.zeros(LayerShape(kv_heads, dim, dim, 6), 25, size, torch.int8, torch.device("cpu"))
table = torch.randperm(25).to(torch.int32)[None]
key, value = torch.randn(2, tokens, kv_heads, dim).half()
places = torch.arange(tokens)
quantize_kv(cache.data, cache.scales, key, value, table[0, places // size].long() * size + places % size)
query = torch.randn(tokens - start, kv_heads * group, dim).half()
kind = Kind(kv_heads * group, kv_heads, dim, AttentionOptions(0.1))
one, own = np.zeros(1, np.int64), tokens_per_item(kind, torch.device("cpu"))
scores = torch.einsum("qhgd,nhd->hgqn", query.double().view(-1, kv_heads, group, dim), key.double()) * 0.1
scores = scores.masked_fill(places > places[start:, None], -torch.inf)
expected = torch.einsum("hgqn,nhd->qhgd", scores.softmax(-1), value.double()).flatten(1, 2)
# With all of their keys, and with parts of them in room for more items than there are.
for room in (None, Room(14, 42, 64)):
    out = torch.full_like(query, torch.nan)
    partial = room and PartialSums(room, [kind], out.device)
    numbers = torch.from_numpy(chunk_items.layout(one, one + tokens - start, one + start, one, own, room))
    assert len(numbers) - 1 <= chunk_items.most_items(tokens - start, 1, own, room) and (room is None or len(numbers) > 10)
    attend_chunks(cache, query, out, numbers, len(numbers) - 1, table, AttentionOptions(0.1), partial=partial)
    assert relative_error(out, expected) < 0.02
"""
STEPS = {
    "int8": """
check(torch.bfloat16, torch.int8, 4, 128, [1, 2, 65, 300])
check(torch.float16, torch.int8, 7, 64, [64, 130])
""",
    "fp8": """
check(torch.bfloat16, torch.float8_e4m3fn, 4, 64, [1, 17, 200])
check(torch.float16, torch.float8_e4m3fn, 12, 64, [90])
""",
    "options": """
check(torch.bfloat16, torch.int8, 3, 64, [5, 100, 250], window=70, cap=4.0)
check(torch.bfloat16, torch.int8, 2, 64, [1, 150], sinks=torch.tensor([0.5, 3.0, -2.0, 1.0]))
""",
    # Groups of 16 parts and of 8, the last of them with one part and with several.
    "many parts": """
check(torch.float16, torch.int8, 4, 64, [2100, 70, 1080], room=80)
check(torch.float16, torch.int8, 12, 64, [1080, 600], sinks=torch.arange(24) / 8 - 1, room=40)
""",
    "many queries": """
check(torch.float16, torch.int8, 20, 64, [1, 90])
""",
    "magnitudes": """
check(torch.bfloat16, torch.int8, 4, 64, [100, 20], factors=(1e9, 1e-3, 1e-9))
check(torch.bfloat16, torch.int8, 4, 64, [100, 20], factors=(1e-9, 10, 1e6))
check(torch.bfloat16, torch.float8_e4m3fn, 4, 64, [100], factors=(1e5, 100, 1e-6))
""",
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_a_decode_step_attends_as_the_reference(steps: str) -> None:
    run_interpreted(DECODE + steps)


@pytest.mark.parametrize("dim", [64, 256])
def test_a_chunk_reads_what_was_written_in_8_bits(dim: int) -> None:
    run_interpreted(f"dim = {dim}\n{CHUNK}")


@pytest.mark.parametrize(("capability", "most"), [((8, 6), 99 << 10), ((8, 0), 163 << 10), ((9, 0), 227 << 10)])
@pytest.mark.parametrize("dim", [128, 256])
def test_chunks_fit_the_shared_memory_of_a_thread_block(dim: int, capability: tuple[int, int], most: int) -> None:
    code = f"""
import torch
from server.engine.runtime.attention.base import AttentionOptions, LayerShape
from server.engine.runtime.attention.kernels.chunk_kernel import PartialSums, attend_chunks
from server.engine.runtime.attention.kernels.decode.key_parts import Room
from server.engine.runtime.attention.kernels.kv_cache import Kind, LayerCache

numbers, tables = torch.zeros(64, dtype=torch.int32), torch.zeros(4, 64, dtype=torch.int32)
query, options = torch.zeros(8, 16, {dim}, dtype=torch.bfloat16), AttentionOptions(0.1)
partial = PartialSums(Room(4, 12, 256), [Kind(16, 8, {dim}, options)], torch.device("cpu"))
for dtype in (torch.bfloat16, torch.int8):
    cache = LayerCache.zeros(LayerShape(8, {dim}, {dim}, 16), 8, 16, dtype, torch.device("cpu"))
    attend_chunks(cache, query, torch.empty_like(query), numbers, 4, tables, options, None, partial)
assert 0 < shared_memory["_reduce"] <= {most}, shared_memory
assert 0 < shared_memory["_attend"] <= {most}, shared_memory
"""
    run_compiled(code, capability)
