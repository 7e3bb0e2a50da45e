"""Stop strings: found however the text is cut, nothing of them let out, nothing else held back for good."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.output import OutputText
from server.text.stop import StopStrings
from server.text.tokenizer import Tokenizer

LETTERS = st.text("ab\n", max_size=24)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=3)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Reading character by character: the first moment at which a stop string is complete."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 24), max_size=8))
@settings(deadline=None)
def test_result_does_not_depend_on_the_cuts(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopStrings(stops)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    out = "".join(matcher.push(text[a:b]) for a, b in itertools.pairwise(bounds))
    out += "" if matcher.matched else matcher.release()
    assert (out, matcher.matched) == expected(text, stops)


@given(text=LETTERS, stops=STOPS)
@settings(deadline=None)
def test_what_is_out_never_begins_a_stop(text: str, stops: list[str]) -> None:
    """At any moment the sent text is a prefix of the final one."""
    final, _ = expected(text, stops)
    matcher, out = StopStrings(stops), ""
    for character in text:
        out += matcher.push(character)
        assert final.startswith(out)


def test_include() -> None:
    matcher = StopStrings(["END"], include=True)
    assert matcher.push("a E") + matcher.push("ND b") == "a END"
    assert matcher.matched == "END"
    assert matcher.push("more") == ""


def test_held_back_only_as_long_as_needed() -> None:
    matcher = StopStrings(["\n\nUser:"])
    assert matcher.push("a\n") == "a"
    assert matcher.push("\nUs") == ""
    assert matcher.push("age") == "\n\nUsage"


def test_stop_completed_within_a_step_counts_its_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("one two three four")
    output = OutputText(byte_level.detokenizer(), ["thr"])
    assert output.push(ids) == "one two "
    assert output.stop_string == "thr"
    assert output.consumed == len(byte_level.encode("one two three"))
    assert output.finish() == ""


def test_stop_strings_wait_for_min_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a b a b a b")
    assert len(ids) == 6
    output = OutputText(byte_level.detokenizer(), ["a"], min_tokens=4)
    assert output.push(ids) == "a b a b "
    assert output.consumed == 5


def test_stop_in_the_last_unfinished_character(byte_level: Tokenizer) -> None:
    output = OutputText(byte_level.detokenizer(), ["\N{REPLACEMENT CHARACTER}"])
    assert output.push(byte_level.encode("x😀")[:-1]) + output.finish() == "x"
    assert output.stop_string is not None
