"""Errors of a start: those that the next start would have, too, end it at once; those that may pass are tried again."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from server.checkpoint.base import CheckpointError
from server.config import EngineConfig
from server.engine import loop
from server.engine.channel import Channel
from server.engine.permanence import is_permanent, is_refusal
from server.engine.runtime.attention.base import UnsupportedModelError
from server.engine.runtime.limits import EngineConfigError
from server.engine.supervisor.process import EngineSetup
from server.types import EngineFailed, FromEngine, LoadProgress


@pytest.mark.parametrize(
    ("error", "told", "fatal"),
    [
        (
            TypeError("'int' is not iterable"),
            "{folder}: the start fails (TypeError: 'int' is not iterable); --log-level",
            True,
        ),
        (OSError(5, "Input/output error"), "OSError: [Errno 5] Input/output error", False),
    ],
)
def test_the_engine_says_whether_it_is_worth_trying_again(
    error: Exception, told: str, fatal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library fails in the middle of a start: what the API process gets to know."""

    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(torch, "set_num_threads", fail)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    addresses = [f"ipc://{tmp_path}/to-engine", f"ipc://{tmp_path}/from-engine"]
    with zmq.Context() as context, context.socket(zmq.PUSH) as commands, context.socket(zmq.PULL) as events:
        commands.bind(addresses[0])
        events.bind(addresses[1])
        setup = EngineSetup(*addresses, str(tmp_path), EngineConfig(device="cpu").model_dump(mode="json"))
        channel = Channel(setup)
        importing = threading.Thread(target=lambda: None)
        importing.start()
        assert loop._run(setup, channel, loop._Stop(), [], importing) == 1
        channel.close()
        decoder = msgspec.msgpack.Decoder(FromEngine)
        message = decoder.decode(events.recv())
        while isinstance(message, LoadProgress):
            message = decoder.decode(events.recv())
        assert isinstance(message, EngineFailed)
        assert message.message.startswith(told.format(folder=tmp_path))
        assert message.fatal == fatal


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
        torch.distributed.DistBackendError("NCCL error: unhandled system error"),
        # By its type, whatever its message says: a file's name may be in it.
        RuntimeError("The size of tensor a (4) must match the size of tensor b (8)"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    assert not is_permanent(error)
