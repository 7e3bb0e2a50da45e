"""Stop strings: found however the text is cut, nothing of them let out, nothing else held back for good."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.answer import AnswerParser, Part
from server.text.calls.json_calls import JsonToolParser
from server.text.output import OutputText
from server.text.reasoning import MARKS, ReasoningSplitter
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
    assert output.push(ids).content == "one two "
    assert output.stop_string == "thr"
    assert output.consumed == len(byte_level.encode("one two three"))
    assert not output.finish()


def test_stop_strings_wait_for_min_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a b a b a b")
    assert len(ids) == 6
    output = OutputText(byte_level.detokenizer(), ["a"], min_tokens=4)
    assert output.push(ids).content == "a b a b "
    assert output.consumed == 5


def test_stop_in_the_last_unfinished_character(byte_level: Tokenizer) -> None:
    output = OutputText(byte_level.detokenizer(), ["\N{REPLACEMENT CHARACTER}"])
    assert output.push(byte_level.encode("x😀")[:-1]).content + output.finish().content == "x"
    assert output.stop_string is not None


def pushed(output: OutputText, ids: list[int]) -> Part:
    """The whole of an answer whose tokens come one by one."""
    part = Part()
    for token_id in ids:
        if output.stop_string is None:
            part.add(output.push([token_id]))
    part.add(output.finish())
    return part


def hermes() -> JsonToolParser:
    return JsonToolParser("<tool_call>", "</tool_call>")


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x, stop"}}\n</tool_call>'


def test_stop_strings_bound_the_content_alone(byte_level: Tokenizer) -> None:
    """Thoughts go on to their end, and a call is complete, whatever is in them."""
    whole = "\nA stop.\n\nQ: b</think>\n\nSure: stop now"
    for stop, content in (
        ("stop", "Sure: "),
        ("\n\n", "Sure: stop now"),
        ("now", "Sure: stop "),
        ("/think", "Sure: stop now"),
    ):
        parser = AnswerParser(ReasoningSplitter(MARKS[0], opened=True))
        output = OutputText(byte_level.detokenizer(), [stop], parser=parser)
        part = pushed(output, byte_level.encode(whole))
        assert (part.reasoning, part.content) == ("\nA stop.\n\nQ: b", content)
        assert (output.stop_string is None) == (stop in ("\n\n", "/think"))
    for stop in ("\n", '"', "}", "stop", "name", "<tool_call>"):
        for forced in (True, False):
            output = OutputText(byte_level.detokenizer(), [stop], parser=AnswerParser(tools=hermes(), forced=forced))
            part = pushed(output, byte_level.encode(CALL))
            assert [(call.name, part.content) for call in part.calls if call.name] == [("f", "")]
            assert "".join(call.arguments for call in part.calls) == '{"a": "x, stop"}'
            assert output.stop_string is None
    output = OutputText(byte_level.detokenizer(), ["stop"], parser=AnswerParser(tools=hermes()))
    part = pushed(output, byte_level.encode(f"Wait, stop {CALL}"))
    assert (part.content, part.calls, output.stop_string) == ("Wait, ", [], "stop")


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_with_special_tokens_in_them(byte_level: Tokenizer, include: bool) -> None:
    """They are found although the tokens leave no text, in thoughts as well, and so is the same text without the tokens."""
    hidden = byte_level.hidden(keep_marks=False)
    cases = [
        ("Hi<|im_end|> there", "<|im_end|>", "Hi", "Hi"),
        ("Hi\n<|im_start|>user\nbye", "<|im_start|>user", "Hi\n", "Hi\nuser"),
        ("Hi\n<|im_start|>tool\nbye", "<|im_start|>user", "Hi\ntool\nbye", "Hi\ntool\nbye"),
        ("a<|im_end|>\n<|im_start|>b", "<|im_end|>\n<|im_start|>", "a", "a\n"),
        ("the <|im_end|> end", "the  end", "", "the  end"),
    ]
    for text, stop, without, whole in cases:
        for parser in (AnswerParser(), AnswerParser(ReasoningSplitter(MARKS[0], opened=True))):
            if parser.thinking and stop == "the  end":
                continue
            output = OutputText(
                byte_level.detokenizer(), ["?", stop], include_stop=include, parser=parser, hidden=hidden
            )
            part = pushed(output, byte_level.encode(text))
            assert part.reasoning + part.content == (whole if include else without)
            assert output.stop_string == (None if "tool" in text else stop)
    spelled = byte_level.encode_plain("Hi<|im_end|> there")
    output = OutputText(byte_level.detokenizer(), ["<|im_end|>"], hidden=hidden)
    assert (pushed(output, spelled).content, output.stop_string) == ("Hi", "<|im_end|>")
    output = OutputText(byte_level.detokenizer(), ["<|im_end|>"], hidden=hidden, min_tokens=3)
    assert (pushed(output, [hidden["<|im_end|>"]] * 5).content, output.consumed) == ("", 3)
