"""Times that are expected on other GPUs follow from an H100's by their data sheets."""

from __future__ import annotations

import pytest

from bench.tables.cards import Card

H100 = Card("H100", 3350, 132, 1.98)


def test_an_h100_takes_what_it_took() -> None:
    assert H100.microseconds(50, 10**6, 0.5) == pytest.approx(50)


def test_half_the_multiprocessors_take_twice_as_long() -> None:
    assert H100._replace(multiprocessors=66).microseconds(50, 10**6, 0.5) == pytest.approx(100)


def test_nothing_is_faster_than_its_bytes() -> None:
    assert H100._replace(bandwidth=1000).microseconds(1, 86 * 10**6, 1.0) == pytest.approx(100)


def test_16_bit_weights_took_what_their_bytes_take() -> None:
    """81.4 microseconds (bench/results/posed-86-nvidia-h100.json), of which the table's share of bandwidth was taken."""
    assert H100.microseconds(1, 28672 * 4096, 2.0) == pytest.approx(81.4, rel=0.01)
