"""Which errors of a start come back with every start, and which may pass."""

from __future__ import annotations

from server.checkpoint.base import CheckpointError

# Errors that the same code raises again on the same files: neither the system's errors nor a lack of memory.
_OF_CODE = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, TypeError, ValueError)
# In the messages of RuntimeErrors of a device or of other processes, which may be gone a moment later.
_OF_DEVICES = ("cuda", "cublas", "cudnn", "nccl", "gloo", "out of memory", "can't allocate", "timed out", "connection")


def is_permanent(error: BaseException) -> bool:
    """Whether a new start would end with this error again, because the checkpoint, the configuration or code is at fault.

    A start that may succeed the next time (memory that another process still has, a disk, a device) is worth trying again.
    """
    import torch

    if is_refusal(error):
        return True
    if isinstance(error, OSError | MemoryError | torch.OutOfMemoryError | torch.AcceleratorError):
        return isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    if isinstance(error, RuntimeError):
        return not any(word in str(error).lower() for word in _OF_DEVICES)
    return isinstance(error, _OF_CODE)


def is_refusal(error: BaseException) -> bool:
    """Whether we raised this error to refuse a checkpoint or configuration; its message then says all that is needed."""
    from server.engine.runtime.attention.base import UnsupportedModelError
    from server.engine.runtime.limits import EngineConfigError

    return isinstance(error, CheckpointError | UnsupportedModelError | EngineConfigError)
