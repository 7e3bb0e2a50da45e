"""Short forms of the trials that bench.faults and bench.soak run for minutes."""

from __future__ import annotations

import pytest

from bench.faults import drain, kills, overload

# tests/api/operation/test_lifecycle.py shows the same of one request each.
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _model(embedded_folder: object) -> None:
    """The embedded model is there."""


def test_killed_engines_lose_no_request_silently() -> None:
    found = kills(2)
    # How fast the engine is back needs quiet cores: bench.faults judges it.
    assert found["ended_as_told"], found
    assert found["endings"]["done"] > 0


def test_sigterm_lets_all_streams_end() -> None:
    found = drain(8, 32)
    assert found["kept"], found


def test_overload_is_refused_and_does_not_slow_the_accepted() -> None:
    found = overload(5.0, slots=4)
    # The ratio of waiting times needs quiet cores: bench.faults judges it.
    assert found["refused"] > found["accepted"] > 0, found
    assert not found["other_endings"], found
    assert found["refusal_s"] < 1, found
    assert found["memory_growth"] < 0.03, found
