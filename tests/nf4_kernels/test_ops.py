"""The torch ops: schemas, fake implementations, torch.compile, and the loud fallback to the oracle."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit

import nf4_kernels
from nf4_kernels import Weight, build, cpu, ops, reference
from tests.nf4_kernels.weights import is_close, quantized


@pytest.mark.parametrize("nested", [False, True])
def test_opcheck(nested: bool) -> None:
    q = quantized((48, 128), 64, nested, seed=1)
    x, bias = torch.randn(3, 128), torch.randn(48)
    torch.library.opcheck(torch.ops.nf4.linear.default, (x, *q.weight.arguments(), bias))
    torch.library.opcheck(torch.ops.nf4.dequantize.default, (*q.weight.arguments(), torch.bfloat16))


def test_an_ops_arguments_are_the_weight() -> None:
    q = quantized((48, 128), 64, True, seed=1)
    weight = replace(q.weight, group_offset=3, group_skip=2)
    found, names = Weight.of(*weight.arguments()), [field.name for field in fields(weight)]
    assert all(getattr(found, name) is getattr(weight, name) for name in names if name != "shape")
    assert found.shape == weight.shape
    schema = torch.ops.nf4.dequantize.default._schema
    assert [argument.name for argument in schema.arguments][:-1] == names[:-1]
    with pytest.raises(ValueError, match="this weight is in fp4"):
        quantized((48, 128), 64, False, seed=1, table="fp4").weight.arguments()


def test_a_compiled_function_gives_what_the_eager_one_gives() -> None:
    q = quantized((48, 128), 64, True, seed=2)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.nf4.linear(x * 2, *q.weight.arguments()) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (1, 5, 9):
        x = torch.randn(rows, 128)
        assert torch.equal(compiled(x), layer(x))


def test_the_public_functions_take_bitsandbytes_states() -> None:
    q = quantized((48, 128), 64, True, seed=3, dtype=torch.bfloat16)
    assert torch.equal(nf4_kernels.dequantize_4bit(q.packed, q.state), dequantize_4bit(q.packed, q.state))
    x = torch.randn(2, 128)
    expected = reference.linear(x, q.weight)
    assert is_close(nf4_kernels.linear_4bit(x, q.packed, q.state), expected)
    q.state.quant_type = "fp4"
    with pytest.raises(ValueError, match="fp4"):
        nf4_kernels.linear_4bit(x, q.packed, q.state)


def test_capabilities_say_what_runs_and_why_not() -> None:
    found = nf4_kernels.capabilities()
    assert found["cpu"] in cpu.ISAS
    assert found["cuda"].startswith("sm_" if torch.cuda.is_available() else "unavailable: ")


def test_a_missing_library_is_said_once_and_the_oracle_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    q = quantized((48, 128), 64, True, seed=4)
    x = torch.randn(2, 128)
    arguments = (x, *q.weight.arguments())
    expected = torch.ops.nf4.linear(*arguments)
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "lib")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(ops, "_warned", set())
    cpu.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            first, second = torch.ops.nf4.linear(*arguments), torch.ops.nf4.linear(*arguments)
        assert nf4_kernels.capabilities()["cpu"].startswith("unavailable: ")
        (tmp_path / "lib" / "libnf4_cpu.so").write_bytes(b"no library")
        cpu.library.cache_clear()
        assert "cannot be loaded" in str(cpu.load_error())
    finally:
        monkeypatch.undo()
        cpu.library.cache_clear()
    assert is_close(first, expected)
    assert torch.equal(first, second)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "no C++ compiler" in warnings[0]
    assert "plain torch" in warnings[0]
