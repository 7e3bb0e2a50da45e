"""When a sequence ends, and what it remembers."""

from __future__ import annotations

from tests.engine.factories import make_sequence

EOS = frozenset({1})


def test_eos_ends_a_sequence() -> None:
    sequence = make_sequence(4, EOS)
    sequence.append(9)
    assert sequence.finish_reason is None
    sequence.append(1)
    assert (sequence.finish_reason, sequence.stop_token_id) == ("stop", 1)


def test_ignore_eos_leaves_stop_tokens() -> None:
    sequence = make_sequence(4, EOS, ignore_eos=True, stop_token_ids=(7,))
    sequence.append(1)
    assert sequence.finish_reason is None
    sequence.append(7)
    assert (sequence.finish_reason, sequence.stop_token_id) == ("stop", 7)


def test_max_tokens_end_with_length() -> None:
    sequence = make_sequence(4, EOS, max_tokens=2)
    sequence.append(9)
    assert sequence.finish_reason is None
    sequence.append(9)
    assert sequence.finish_reason == "length"


def test_eos_on_the_last_allowed_token_is_a_stop() -> None:
    sequence = make_sequence(4, EOS, max_tokens=1)
    sequence.append(1)
    assert sequence.finish_reason == "stop"


def test_min_tokens_counts_tokens_before_the_end() -> None:
    sequence = make_sequence(4, EOS, min_tokens=2)
    sequence.append(1)
    sequence.append(1)
    assert sequence.finish_reason is None
    sequence.append(1)
    assert sequence.finish_reason == "stop"
