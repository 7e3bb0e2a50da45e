"""Share of the launches' time that counts as decoding, from those in which it was timed."""

from __future__ import annotations

import pytest

from nf4_kernels.cuda.device_clock import WINDOW, DecodingShare


def test_the_sampled_launches_share_counts_for_all() -> None:
    share = DecodingShare()
    share.add(1_000_000, 20_000, 5_000)
    assert share.nanoseconds == pytest.approx(250_000)
    share.add(400_000, 0, 0)
    assert share.nanoseconds == pytest.approx(350_000)


def test_time_before_the_first_sample_counts_once_there_is_one() -> None:
    share = DecodingShare()
    share.add(1_000_000, 0, 0)
    assert share.nanoseconds == 0
    share.add(1_000_000, 10_000, 4_000)
    assert share.nanoseconds == pytest.approx(800_000)


def test_old_samples_are_forgotten() -> None:
    share = DecodingShare()
    share.add(WINDOW, WINDOW, WINDOW)
    before = share.nanoseconds
    share.add(WINDOW, WINDOW, WINDOW // 10)
    assert share.nanoseconds - before == pytest.approx(WINDOW / 10)


def test_a_sampled_warp_cannot_decode_longer_than_its_launch() -> None:
    share = DecodingShare()
    share.add(100, 10, 20)
    assert share.nanoseconds == 100
