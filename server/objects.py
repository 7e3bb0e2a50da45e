"""The garbage collector of a process that serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_objects() -> None:
    """Keep the garbage collector from looking through the objects that there are now; call when a process is ready.

    What the libraries have made stays alive. Looking through it takes 50 ms in the API process and 260 ms in the engine's
    (half a million objects), in which all streams would stall.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def lasting_objects() -> Iterator[None]:
    """Keep the garbage collector from looking through what is made while entered: modules, while they are imported.

    It would do so again and again as their number grows, for a quarter of the seconds that torch and transformers take.
    """
    runs = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if runs:
            gc.enable()
