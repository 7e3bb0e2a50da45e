"""Ranks of a model, each in a process of its own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def processes() -> None:
    """Mark the tests of this folder, which start ranks, as `process` (tests/conftest.py)."""
