"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.engine.scheduling import running


# Of a module, because hypothesis runs a test many times with a test's own fixtures.
@pytest.fixture(scope="module", params=[False, True], ids=["chunks", "columns"])
def in_columns(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether sequences that decode are in columns, which otherwise takes more of them than these tests have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "COLUMNS_FROM", 1 if request.param else 1_000_000)
        yield request.param
