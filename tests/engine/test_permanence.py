"""Errors of a start: those that the next start would have, too, end it at once; those that may pass are tried again."""

from __future__ import annotations

import pytest
import torch

from server.checkpoint.base import CheckpointError
from server.engine.permanence import is_permanent, is_refusal
from server.engine.runtime.attention.base import UnsupportedModelError
from server.engine.runtime.limits import EngineConfigError


@pytest.mark.parametrize("error", [CheckpointError("x"), UnsupportedModelError("x"), EngineConfigError("x")])
def test_refusals_are_permanent(error: Exception) -> None:
    assert is_refusal(error)
    assert is_permanent(error)


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("'GPT2Model' object has no attribute 'layers'"),
        TypeError("argument of type 'int' is not iterable"),
        KeyError("rope_type"),
        ZeroDivisionError("division by zero"),
        NotImplementedError("no such layer"),
        ImportError("no module named 'x'"),
        FileNotFoundError(2, "No such file"),
        RuntimeError("The size of tensor a (4) must match the size of tensor b (8)"),
    ],
)
def test_errors_of_code_are_permanent(error: Exception) -> None:
    assert is_permanent(error)
    assert not is_refusal(error)


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "Input/output error"),
        ConnectionResetError(104, "Connection reset by peer"),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("NCCL error: unhandled system error"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    assert not is_permanent(error)
