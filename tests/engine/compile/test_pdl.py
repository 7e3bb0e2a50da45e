"""Kernels that start before the one in front has ended: what inductor's are made to do, and that nothing is read early."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.utils import IndentedBuffer

from nf4_kernels import Weight, cuda
from server.engine.runtime.compile.pdl import _warn_without_pdl, dependent_launches


class _Kernel:
    """What of inductor's TritonKernel is asked."""

    GDC_WAIT = TritonKernel.GDC_WAIT
    GDC_LAUNCH = TritonKernel.GDC_LAUNCH

    def __init__(self, overlaps: bool) -> None:
        self._enable_pdl_codegen = lambda: overlaps


def _body() -> IndentedBuffer:
    code = IndentedBuffer()
    code.writelines(["xindex = 0", "early = tl.load(in_ptr1)", _Kernel.GDC_WAIT, "x = tl.load(in_ptr0)"])
    with code.indent():
        code.writelines([_Kernel.GDC_WAIT, _Kernel.GDC_LAUNCH])
    code.writelines([_Kernel.GDC_WAIT, "tl.store(out_ptr0, x)"])
    return code


def test_a_kernel_lets_the_next_start_and_waits_before_anything_else() -> None:
    before = TritonKernel._filter_pdl
    with dependent_launches():
        code, plain = _body(), _body()
        TritonKernel._filter_pdl(_Kernel(True), code)
        TritonKernel._filter_pdl(_Kernel(False), plain)
        assert torch._inductor.config.triton.enable_pdl
        assert torch.compiler.config.cache_key_tag
    assert [line.strip() for line in code.getvalue().splitlines()] == [
        _Kernel.GDC_LAUNCH,
        _Kernel.GDC_WAIT,
        "xindex = 0",
        "early = tl.load(in_ptr1)",
        "x = tl.load(in_ptr0)",
        "tl.store(out_ptr0, x)",
    ]
    assert plain.getvalue() == _body().getvalue()
    assert TritonKernel._filter_pdl is before
    assert not torch._inductor.config.triton.enable_pdl
    assert not torch.compiler.config.cache_key_tag


def test_without_inductors_method_kernels_do_not_start_early(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_without_pdl.cache_clear()
    monkeypatch.delattr(TritonKernel, "_filter_pdl")
    # Somebody may have switched it on for all that torch compiles.
    with torch._inductor.config.patch({"triton.enable_pdl": True}):
        for _ in range(2):
            with dependent_launches():
                assert not torch._inductor.config.triton.enable_pdl
                assert not hasattr(TritonKernel, "_filter_pdl")
                assert not torch.compiler.config.cache_key_tag
        assert torch._inductor.config.triton.enable_pdl
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "without programmatic dependent launch, more slowly" in warning


@pytest.mark.gpu
@pytest.mark.skipif(cuda.load_error() is not None, reason=f"CUDA kernels: {cuda.load_error()}")
@pytest.mark.parametrize("m", [1, 8, 16, 32, 64])
def test_nothing_is_read_before_it_is_written(m: int) -> None:
    """GEMMs and compiled kernels in turns; two kernels in a row, which also read what older launches have written."""
    shapes = [(10240, 5120), (5120, 10240), (5120, 5120), (8192, 5120), (5120, 8192)]
    weights = [
        Weight(
            torch.randint(0, 256, (n * k // 2,), dtype=torch.uint8, device="cuda"),
            (n, k),
            torch.rand(n * k // 64, device="cuda") / k**0.5,
            64,
        )
        for n, k in shapes
    ]
    x = torch.randn(m, 5120, device="cuda", dtype=torch.bfloat16)

    def norm(y: torch.Tensor, older: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = y + older
        return torch.nn.functional.rms_norm(total.float(), total.shape[-1:]).to(y.dtype), total

    def half(y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(y * 0.5)

    def chain(
        norm: Callable[..., tuple[torch.Tensor, torch.Tensor]], half: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        y, total = norm(x, x)
        for weight in weights * 3:
            y = cuda.linear(y, weight)
            y, total = norm(half(y), total) if weight.shape[0] == 5120 else (half(y), total)
        return total

    with dependent_launches():
        compiled = [torch.compile(function, dynamic=False) for function in (norm, half)]
        expected = chain(*compiled)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(*compiled)
    right = []
    for _ in range(200):
        out.fill_(float("nan"))
        graph.replay()
        right.append(torch.equal(out, expected))
    assert all(right), f"{right.count(False)} of {len(right)} replays differ"
