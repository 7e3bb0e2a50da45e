"""GEMMs on CPU with several threads, which take tasks that others have left, and several callers at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from nf4_kernels import cpu, reference
from nf4_kernels.cpu import moe as cpu_moe
from tests.nf4_kernels.weights import quantized, using_isa

N, K = 1003, 576
Gemm = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gemms() -> list[Gemm]:
    """A GEMM of each kind of weight whose rows threads divide among themselves."""
    weight, plain = quantized((N, K), 64, True, seed=1).weight, torch.randn(N, K).to(torch.bfloat16)
    experts = quantized((4, 72, K), 64, False, seed=2).weight

    def moe(x: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(2 * len(x), dtype=torch.int32).view(-1, 2) % 4
        return cpu_moe.moe_linear(x, experts, ids, None, None)

    return [lambda x: cpu.linear(x, weight), lambda x: cpu.linear_bf16w(x, plain), moe]


@pytest.mark.parametrize("isa", cpu.ISAS)
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_any_number_of_threads_computes_every_row(isa: str, rows: int) -> None:
    """70 are more than there are parts that threads have tasks of their own in."""
    x = torch.randn(rows, K)
    with using_isa(isa):
        for gemm in gemms():
            with threads(1):
                expected = gemm(x)
            for count in (2, 3, 70):
                with threads(count):
                    found = gemm(x)
                torch.testing.assert_close(found, expected, rtol=0, atol=3e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("isa", cpu.ISAS)
def test_any_number_of_threads_dequantizes(isa: str) -> None:
    weight = quantized((N, K), 64, True, seed=1).weight
    with using_isa(isa):
        for count in (2, 3, 70):
            with threads(count):
                assert torch.equal(cpu.dequantize(weight, torch.float32), reference.dequantize(weight, torch.float32))


def test_callers_do_not_take_each_others_tasks() -> None:
    inputs = [torch.randn(1 + caller, K) for caller in range(4)]
    with threads(2):
        for gemm in gemms():
            expected = [gemm(x) for x in inputs]

            def calls(caller: int, gemm: Gemm = gemm, expected: list[torch.Tensor] = expected) -> bool:
                return all(torch.equal(gemm(inputs[caller]), expected[caller]) for _ in range(30))

            with ThreadPoolExecutor(len(inputs)) as pool:
                assert all(pool.map(calls, range(len(inputs))))
