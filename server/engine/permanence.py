"""Errors of a start as permanent (no new start) or transient."""

from __future__ import annotations

from server.checkpoint.base import CheckpointError

# Errors that the same code raises again on the same files: neither the system's errors nor a lack of memory.
_OF_CODE = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError),
    *(TypeError, ValueError),
)


def is_permanent(error: BaseException) -> bool:
    """Whether a new start would end with this error again, because the checkpoint, the configuration or code is at fault.

    A start that may succeed the next time (memory that another process still has, a disk, a device) is worth trying again.
    """
    if is_refusal(error):
        return True
    if isinstance(error, OSError):
        return isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    # Plain RuntimeErrors are torch's for wrong shapes and for libraries of a device, such as cuBLAS without memory. A start
    # too many costs a minute, a start too few the server.
    return isinstance(error, _OF_CODE)


def is_refusal(error: BaseException) -> bool:
    """Whether we raised this error to refuse a checkpoint or configuration; its message then says all that is needed."""
    from server.engine.runtime.attention.base import UnsupportedModelError
    from server.engine.runtime.limits import EngineConfigError

    return isinstance(error, CheckpointError | UnsupportedModelError | EngineConfigError)
