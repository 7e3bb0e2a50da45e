"""Number of requests that replicas have: what the router for Ray Serve goes by. Ray itself is not needed here."""

from __future__ import annotations

from server.ray_serve.placement import Placement


def test_a_request_counts_once_from_its_placing_to_its_end() -> None:
    placement = Placement()
    placement.place("1", "a")
    placement.place("2", "a")
    assert (placement.count("a"), placement.count("b")) == (2, 0)
    placement.place("2", "b")  # a refused it
    placement.remove("2", "a")  # which is told only now
    assert (placement.count("a"), placement.count("b")) == (1, 1)
    placement.remove("1")
    placement.remove("2", "b")
    placement.remove("2", "b")
    assert (placement.count("a"), placement.count("b")) == (0, 0)


def test_a_request_that_went_elsewhere_counts_there() -> None:
    placement = Placement()
    placement.place("1", "a")
    placement.correct("1", "b")
    assert (placement.count("a"), placement.count("b")) == (0, 1)
    placement.remove("1", "b")
    placement.correct("1", "a")  # it had ended before
    assert (placement.count("a"), placement.count("b")) == (0, 0)
