"""The compiled CPU kernels, every instruction set of this CPU, against bitsandbytes and float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, get_4bit_type

import nf4_kernels
from nf4_kernels import Weight, cpu, moe_torch, reference
from nf4_kernels.cpu import moe as cpu_moe
from nf4_kernels.format import TABLES
from tests.nf4_kernels.shards import along_k, along_n
from tests.nf4_kernels.weights import FIXED_POINT, float32_bound, is_close, quantized, using_isa

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


@pytest.fixture(params=cpu.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that this CPU has, in turn."""
    assert cpu.load_error() is None
    with using_isa(request.param):
        assert cpu.isa() == request.param
        yield request.param


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_dequantize_is_bitsandbytes_bit_for_bit(isa: str, blocksize: int, nested: bool) -> None:
    for seed, shape in enumerate([(64, 192), (1, 64), (63, 65), (1, 1), (7, 4096 + 34), (3, 5, 7)]):
        q = quantized(shape, blocksize, nested, seed)
        for dtype in DTYPES:
            q.state.dtype = dtype
            expected = reference.dequantize(q.weight, dtype)
            got = cpu.dequantize(q.weight, dtype)
            assert got.dtype == dtype
            assert got.shape == shape
            assert torch.equal(got, expected), (shape, dtype)
            if len(shape) == 2 and (shape[1] % blocksize == 0 or shape[1] % 2 or blocksize >= 2048):
                # Elsewhere bitsandbytes' fused CPU kernel reads the wrong scale for blocks that span rows.
                assert torch.equal(got, dequantize_4bit(q.packed, q.state)), (shape, dtype)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("blocksize", [64, 128, 4096])
def test_fp4_is_the_same_with_another_table(isa: str, blocksize: int, nested: bool) -> None:
    assert TABLES["fp4"] == tuple(get_4bit_type("fp4", device="cpu").tolist())
    for seed, shape in enumerate([(64, 192), (1, 64), (7, 4096 + 34)]):
        q = quantized(shape, blocksize, nested, seed, table="fp4")
        for dtype in DTYPES:
            got = cpu.dequantize(q.weight, dtype)
            assert torch.equal(got, reference.dequantize(q.weight, dtype))
            q.state.dtype = dtype
            if shape[1] % blocksize == 0:
                assert torch.equal(got, dequantize_4bit(q.packed, q.state)), (shape, dtype)


@pytest.mark.parametrize("nested", [False, True])
def test_fp4_linear(isa: str, nested: bool) -> None:
    for rows in (1, 3, 7, 13, 33, 150):
        for n, k in ((192, 576), (63, 192), (5, 65)):
            q = quantized((n, k), 64, nested, rows, table="fp4")
            x = torch.randn(rows, k)
            expanded = reference.dequantize(q.weight, torch.float32)
            exact = x.double() @ expanded.double().T
            assert _errors(cpu.linear(x, q.weight), exact) <= float32_bound(x, expanded, exact), (rows, n, k)
            theirs = reference.linear(x.bfloat16(), q.weight)
            assert _errors(cpu.linear(x.bfloat16(), q.weight), theirs.double()) <= 1e-2


def test_fp4_experts(isa: str) -> None:
    q = quantized((4, 64, 128), 64, False, 3, table="fp4")
    x, experts = torch.randn(9, 128), torch.randint(0, 4, (9, 2), dtype=torch.int32)
    assert is_close(
        cpu_moe.moe_linear(x, q.weight, experts, None, None), moe_torch.moe_linear(x, q.weight, experts, None, None)
    )


def test_what_takes_nf4_alone_refuses_fp4() -> None:
    q = quantized((64, 128), 64, False, 3, table="fp4")
    with pytest.raises(ValueError, match="quant_type must be nf4, got fp4"):
        Weight.from_quant_state(q.packed, q.state)
    with pytest.raises(ValueError, match="table must be one of"):
        cpu.dequantize(replace(q.weight, table="int4"), torch.float32)


def _errors(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


ROWS = (1, 2, 3, 4, 5, 8, 13, 16, 31, 33, 64, 150)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [*((rows, torch.float32) for rows in ROWS), *((rows, dtype) for rows in (1, 5, 33) for dtype in DTYPES[1:])],
)
def test_linear_is_no_further_from_float64_than_bitsandbytes(isa: str, rows: int, dtype: torch.dtype) -> None:
    for seed, (n, k, blocksize) in enumerate(
        [(192, 576, 64), (63, 192, 64), (1, 64, 64), (100, 320, 128), (40, 512, 256)]
    ):
        q = quantized((n, k), blocksize, seed % 2 == 0, seed=rows * 100 + seed)
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, k, generator=generator).to(dtype)
        bias = torch.randn(n, generator=generator).to(dtype) if seed % 2 else None
        expanded = reference.dequantize(q.weight, torch.float32)
        exact = x.double() @ expanded.double().T + (0 if bias is None else bias.double())
        theirs = reference.linear(x, q.weight, bias)
        ours = cpu.linear(x, q.weight, bias)
        assert ours.dtype == dtype
        # float32: both are at rounding level, where sums of split k cost a little. 16 bit: never worse than by noise.
        allowed = float32_bound(x, expanded, exact)
        if dtype is not torch.float32:
            allowed = 1.05 * _errors(theirs, exact) + (allowed if isa in FIXED_POINT else 1e-5)
        assert _errors(ours, exact) <= allowed, (n, k)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 65), (63, 100), (17, 4160), (3, 33)])
def test_shapes_whose_rows_do_not_begin_with_a_block(isa: str, n: int, k: int) -> None:
    for rows in (1, 6, 40):
        q = quantized((n, k), 64, True, seed=n)
        x = torch.randn(rows, k)
        expanded = reference.dequantize(q.weight, torch.float32)
        exact = x.double() @ expanded.double().T
        assert _errors(cpu.linear(x, q.weight), exact) <= float32_bound(x, expanded, exact)


@pytest.mark.parametrize("blocksize", [32, 64, 128])
def test_weights_joined_with_their_nested_scales(isa: str, blocksize: int) -> None:
    k, ns = 512, (16 * blocksize, 48 * blocksize // 32)
    parts = [quantized((n, k), blocksize, True, seed) for seed, n in enumerate(ns)]
    shape = (sum(ns), k)
    codes, table = torch.cat([p.state.absmax for p in parts]), parts[0].state.state2.code
    absmax = torch.cat([p.weight.absmax for p in parts])
    offsets = torch.cat([p.state.offset.expand(p.weight.absmax.numel()) for p in parts])
    joined = Weight(torch.cat([p.packed for p in parts]), shape, absmax, blocksize, codes, table, offsets)
    apart = [cpu.dequantize(p.weight, torch.float32) for p in parts]
    for library in (cpu, reference):
        assert torch.equal(library.dequantize(joined, torch.float32), torch.cat(apart))
    for rows in (1, 6, 40):
        x = torch.randn(rows, k)
        exact = x.double() @ torch.cat(apart).double().T
        assert _errors(cpu.linear(x, joined), exact) <= float32_bound(x, torch.cat(apart), exact)
    for library in (cpu, reference):
        with pytest.raises(ValueError, match="absmax_offset must be float32 with 1 element"):
            library.dequantize(replace(joined, absmax_offset=offsets[:-1]), torch.float32)


def test_every_output_is_written_and_strided_inputs_are_read_right(isa: str) -> None:
    q = quantized((96, 128), 64, False, seed=3)
    wide = torch.randn(10, 256)
    x = wide[:, ::2]
    assert not x.is_contiguous()
    expected = cpu.linear(x.contiguous(), q.weight)
    for _ in range(3):
        poison = torch.full((10, 96), float("nan"))
        del poison  # its memory is what the next empty() of that size gets
        assert torch.equal(cpu.linear(x, q.weight), expected)
    assert torch.equal(cpu.linear(x.reshape(2, 5, 128), q.weight), expected.view(2, 5, 96))
    assert cpu.linear(x[:0], q.weight).shape == (0, 96)


def test_weights_whose_tensors_are_not_contiguous(isa: str) -> None:
    for nested in (False, True):
        weight = quantized((96, 128), 64, nested, seed=7).weight
        apart = {
            name: torch.stack((tensor, tensor), -1)[..., 0]
            for name in ("packed", "absmax", "absmax_8bit", "absmax_code")
            if (tensor := getattr(weight, name)) is not None
        }
        assert not apart["packed"].is_contiguous()
        x = torch.randn(3, 128)
        for changed in (replace(weight, **apart), *(replace(weight, **{name: apart[name]}) for name in apart)):
            assert torch.equal(cpu.linear(x, changed), cpu.linear(x, weight))
            assert torch.equal(cpu.dequantize(changed, torch.float32), cpu.dequantize(weight, torch.float32))


def test_a_row_does_not_depend_on_the_rows_beside_it_in_float32(isa: str) -> None:
    q = quantized((576, 576), 64, True, seed=4)
    x = torch.randn(40, 576)
    together = cpu.linear(x, q.weight)
    alone = torch.cat([cpu.linear(r, q.weight) for r in x.split(1)])
    assert torch.allclose(together, alone, rtol=0, atol=3e-5 * float(alone.abs().max()))


@pytest.mark.parametrize("rows", [1, 3, 8, 40])
def test_linear_with_bfloat16_weights(isa: str, rows: int) -> None:
    weight = torch.randn(1003, 576).to(torch.bfloat16)
    x, bias = torch.randn(rows, 576), torch.randn(1003)
    exact = x.double() @ weight.double().T
    assert _errors(cpu.linear_bf16w(x, weight), exact) <= 1e-5
    assert _errors(cpu.linear_bf16w(x, weight, bias), exact + bias.double()) <= 1e-5


def test_bad_arguments_are_named() -> None:
    q = quantized((64, 128), 64, False, seed=1)
    good = q.weight
    x = torch.randn(2, 128)
    with pytest.raises(ValueError, match="end in 128"):
        cpu.linear(x[:, :64], good)
    with pytest.raises(ValueError, match="float64"):
        cpu.linear(x.double(), good)
    with pytest.raises(ValueError, match="blocksize"):
        cpu.linear(x, replace(good, blocksize=63))
    with pytest.raises(ValueError, match=r"shape must be \[N, K\]"):
        cpu.linear(x, replace(good, shape=(4, 16, 128)))
    with pytest.raises(ValueError, match="packed has"):
        cpu.linear(x, replace(good, packed=good.packed[:100]))
    with pytest.raises(ValueError, match="absmax"):
        cpu.linear(x, replace(good, absmax=good.absmax[:5]))
    with pytest.raises(ValueError, match="bias"):
        cpu.linear(x, good, torch.zeros(64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="instruction set"):
        cpu.set_isa("mmx")


def test_the_clock_counts_linear_time() -> None:
    q = quantized((1536, 576), 64, True, seed=5)
    dequant, linear = cpu.clock()
    for _ in range(10):
        cpu.linear(torch.randn(64, 576), q.weight)
        cpu.dequantize(q.weight, torch.float32)
    dequant_after, linear_after = cpu.clock()
    assert 0 < linear_after - linear < 10
    assert 0 < dequant_after - dequant < 10


@pytest.mark.parametrize("blocksize", [64, 128, 512])
def test_shards_of_nested_weights_keep_the_whole_ones_groups(isa: str, blocksize: int) -> None:
    n, k, parts = 37, 3 * 1024, 3
    q = quantized((n, k), blocksize, True, seed=blocksize)
    whole = reference.dequantize(q.weight, torch.float32)
    x = torch.randn(5, k)
    for part in range(parts):
        rows, columns = range(part * 12, part * 12 + 12), range(part * k // parts, (part + 1) * k // parts)
        of_columns = slice(columns.start, columns.stop)
        for shard, expected, given in (
            (along_n(q.weight, rows), whole[rows.start : rows.stop], x),
            (along_k(q.weight, columns), whole[:, of_columns], x[:, of_columns]),
        ):
            assert torch.equal(reference.dequantize(shard, torch.float32), expected)
            assert torch.equal(cpu.dequantize(shard, torch.float32), expected)
            assert torch.equal(nf4_kernels.dequantize_4bit(shard.packed, shard, torch.float32), expected)
            exact = given.double() @ expected.double().T
            for found in (cpu.linear(given, shard), nf4_kernels.linear_4bit(given, shard.packed, shard)):
                assert _errors(found, exact) <= float32_bound(given, expected, exact)


def test_a_shard_whose_rows_are_not_whole_blocks_is_refused() -> None:
    q = quantized((4, 96), 64, True, seed=0)
    with pytest.raises(ValueError, match="whole scale blocks of 64, got K = 96"):
        cpu.dequantize(replace(q.weight, group_skip=3), torch.float32)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        cpu.dequantize(replace(q.weight, group_offset=-1), torch.float32)
