"""The kernels are tested with as many threads as torch takes."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Takes the place of the fixture of all rooms."""
