"""Engines with speculation whose costs are planted ones."""

from __future__ import annotations

import pytest

from server.engine.runtime.preparation import step_costs


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts do not measure what steps take: the tests say it afterwards."""
    monkeypatch.setattr(step_costs, "_least", lambda _run, sizes, _repeats: dict.fromkeys(sizes, 1.0))
