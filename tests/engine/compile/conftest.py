"""Layers that torch.compile compiles."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def processes() -> None:
    """Mark the tests of this folder, which run compilers, as `process` (tests/conftest.py)."""
