"""The garbage collector beside imports, and once a process is ready."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from server.objects import lasting_objects

_PROGRAM = """
import gc
from server.objects import lasting_objects
made = []
with lasting_objects():
    assert not gc.isenabled()
    made = [[] for _ in range(100_000)]
assert gc.isenabled()
assert gc.get_freeze_count() > 100_000
"""


def test_what_is_made_meanwhile_is_not_looked_through() -> None:
    """In a process of its own: what is frozen stays so."""
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=60)


def test_the_collector_is_as_before_where_an_import_fails() -> None:
    for runs in (True, False):
        (gc.enable if runs else gc.disable)()
        try:
            with pytest.raises(ImportError), lasting_objects():
                raise ImportError
            assert gc.isenabled() == runs
        finally:
            gc.enable()
            gc.unfreeze()
