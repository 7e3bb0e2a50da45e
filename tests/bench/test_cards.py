"""Times that are expected on other GPUs follow from an H200's by their data sheets."""

from __future__ import annotations

import pytest

from bench.tables.cards import Card

H200 = Card("H200", 4800, 132, 1.98, 4096)


def test_an_h200_takes_what_it_took() -> None:
    assert H200.microseconds(50, 1, 10**6, 0.5) == pytest.approx(50)


def test_half_the_multiprocessors_take_twice_as_long() -> None:
    assert H200._replace(multiprocessors=66).microseconds(50, 1, 10**6, 0.5) == pytest.approx(100)


def test_nothing_is_faster_than_its_bytes() -> None:
    assert H200._replace(bandwidth=1000).microseconds(1, 1, 86 * 10**6, 1.0) == pytest.approx(100)


def test_nothing_is_faster_than_its_arithmetic() -> None:
    """48 tokens of 28672 x 4096 at an RTX 3090's 71 TFLOP/s."""
    card = Card("RTX 3090", 936, 82, 1.70, 512)
    assert card.microseconds(1, 48, 28672 * 4096, 0.5) == pytest.approx(2 * 48 * 28672 * 4096 / 71.4e6, rel=0.01)


def test_16_bit_weights_took_what_their_bytes_take() -> None:
    """81.4 microseconds on an H100 (bench/results/posed-86-nvidia-h100.json), of which the share of bandwidth was taken."""
    assert H200._replace(bandwidth=3350).microseconds(1, 1, 28672 * 4096, 2.0) == pytest.approx(81.4, rel=0.01)
