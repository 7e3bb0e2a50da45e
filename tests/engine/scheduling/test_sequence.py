"""When a sequence ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.factories import make_sequence

EOS = 1
ENDS: dict[str, tuple[dict[str, Any], list[int], tuple[str, int | None]]] = {
    "eos": ({}, [9, EOS], ("stop", EOS)),
    "a stop token, eos being ignored": ({"ignore_eos": True, "stop_token_ids": (7,)}, [EOS, 7], ("stop", 7)),
    "max_tokens": ({"max_tokens": 2}, [9, 9], ("length", None)),
    "eos as the last token that is allowed": ({"max_tokens": 1}, [EOS], ("stop", EOS)),
    "eos behind min_tokens": ({"min_tokens": 2}, [EOS, EOS, EOS], ("stop", EOS)),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_sequence_ends_with_the_last_of_these_tokens(case: str) -> None:
    options, tokens, end = ENDS[case]
    sequence = make_sequence(4, frozenset({EOS}), **options)
    for token in tokens:
        assert sequence.finish_reason is None
        sequence.append(token)
    assert (sequence.finish_reason, sequence.stop_token_id) == end
