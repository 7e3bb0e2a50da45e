"""The imports of an engine's process, which are most of its start on CPU."""

from __future__ import annotations

from server.objects import lasting_objects


def import_bitsandbytes() -> None:
    """Import bitsandbytes without torch's compiler, which takes 1.6 s of a core.

    It has four functions compiled as it is imported: steps of optimizers, and dequantization on CPU. Engines compile
    nothing, so these run as they are written.
    """
    import torch

    compiler = torch.compile
    torch.compile = _as_written  # type: ignore[assignment]
    try:
        import bitsandbytes  # noqa: F401
    finally:
        torch.compile = compiler


def _as_written(function: object = None, **_: object) -> object:
    """Leave a function as it is; used as a decorator with arguments, too."""
    return function if function is not None else _as_written


def import_engine() -> None:
    """Import what an engine on CPU needs; on a GPU a little more follows. Seconds."""
    with lasting_objects():
        import_bitsandbytes()
        import server.engine.core
        import server.engine.grammar
        import server.engine.parallel.start  # noqa: F401
