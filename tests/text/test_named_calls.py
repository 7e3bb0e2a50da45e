"""Calls of DeepSeek's, Apertus' and Cohere's models in their own notations, and what stands around these models' answers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.answer import AnswerParser
from server.text.calls.named_calls import APERTUS, DEEPSEEK, DEEPSEEK_R1, MISTRAL, Named, NamedToolParser
from server.text.dialect import Dialect
from server.text.reasoning import MARKS, ReasoningSplitter
from tests.text.templates import Templated
from tests.text.test_template_families import HISTORY
from tests.text.test_toolcalls import Outcome, parse

CALLS, CALL, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
CALL_END, CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
FIRST = f'{CALLS}{CALL}f{SEP}{{"a": 1}}{CALL_END}'
FENCED = "\n".join(
    f"{CALL}function{SEP}{name}\n```json\n{body}\n```{CALL_END}" for name, body in (("f", '{"a": "```"}'), ("g", "{}"))
)
PREFIX, SUFFIX = "<|tools_prefix|>", "<|tools_suffix|>"

CASES: list[tuple[str, str, Outcome]] = [
    ("deepseek_r1", f"Hm.{CALLS}{FENCED}{CALLS_END}", ("Hm.", [("f", '{"a": "```"}'), ("g", "{}")])),
    # Templates of the same models show either notation.
    ("deepseek", f"Hm.{CALLS}{FENCED}{CALLS_END}", ("Hm.", [("f", '{"a": "```"}'), ("g", "{}")])),
    ("deepseek", f"{FIRST}{CALL}g{SEP}{{}}{CALL_END}{CALLS_END} bye", ("bye", [("f", '{"a": 1}'), ("g", "{}")])),
    ("deepseek", f"{FIRST}{CALL}g<｜to", ("", [("f", '{"a": 1}')])),
    ("deepseek", f"{FIRST}bye", ("bye", [("f", '{"a": 1}')])),
    ("deepseek", f'{CALLS}{CALL}f{SEP}{{"a": [', ("", [("f", '{"a": [')])),
    *(
        ("deepseek", text, (text, []))
        for text in (CALLS, f"{CALLS}no call{CALLS_END} at all", "a <｜tool", f"{CALLS}f<｜t", f"{CALLS}{CALLS_END}")
    ),
    (
        "apertus",
        f'Hm.{PREFIX}[{{"f": {{"a": "}}]"}}}}, {{"g": {{}}}}]{SUFFIX}',
        ("Hm.", [("f", '{"a": "}]"}'), ("g", "{}")]),
    ),
    ("apertus", f'{PREFIX}[{{"name": "f", "arguments": {{"a": 1}}}}]{SUFFIX}', ("", [("f", '{"a": 1}')])),
    ("apertus", f'{PREFIX}[{{"f": {{"a": 1}}}}, {{"g', ("", [("f", '{"a": 1}')])),
    ("deepseek", f"{CALLS}{'no call ' * 99}{CALLS_END}.", (f"{CALLS}{'no call ' * 99}{CALLS_END}.", [])),
    ("deepseek", f"{FIRST}{'no call ' * 99}.", (f"{'no call ' * 99}.", [("f", '{"a": 1}')])),
    (
        "apertus",
        f'{PREFIX}[{{"name": "f", "arguments": {{"a": "{"x" * 999}"}}}}]{SUFFIX}',
        ("", [("f", f'{{"a": "{"x" * 999}"}}')]),
    ),
    ("apertus", f"{PREFIX}[1, 2]{SUFFIX}.", (f"{PREFIX}[1, 2]{SUFFIX}.", [])),
    (
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
        '    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
        ("", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("family", "text", "expected"), CASES)
def test_calls(family: str, text: str, expected: Outcome, step: int) -> None:
    dialect = next(each for each in map(Dialect.of, TEMPLATES, [()] * len(TEMPLATES)) if each.family == family)
    assert parse(dialect.tool_parser({}), text, step) == expected


TEMPLATES = (f"{CALLS}", f"{CALLS}```json", "{{ tools }}<|tools_prefix|>", "{{ tools }}<|START_ACTION|>")


@given(
    text=st.lists(st.sampled_from([CALLS, CALL, SEP, CALL_END, CALLS_END, "f", "{", "}", '"', "\n"])),
    step=st.integers(1, 9),
)
@settings(deadline=None)
def test_nothing_gets_lost_or_raises(text: list[str], step: int) -> None:
    for notation in (DEEPSEEK, DEEPSEEK_R1, APERTUS):
        whole = "".join(text)
        content, calls = parse(NamedToolParser(notation), whole, step)
        assert calls or content.strip() == whole.strip()


@pytest.mark.parametrize("begun", ["", "f", "function"])
@pytest.mark.parametrize("notation", [MISTRAL, DEEPSEEK, APERTUS])
def test_lines_without_end_behind_a_mark_hold_nobody_up(notation: Named, begun: str) -> None:
    """As models write them that have lost their way. All answers wait while one is read: 400 lines took 16 s."""
    text = notation.mark + begun + "\n" * 2000
    start = time.thread_time()
    assert parse(NamedToolParser(notation), text, 1) == (text, [])
    assert time.thread_time() - start < 5


@pytest.mark.parametrize("step", [1, 4, 100])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes <|.<|END_RESPONSE|>", ("Hm.", "Yes <|.")),
        ("<|START_TEXT|>Yes.<|END_TEXT|>", ("", "Yes.")),
        ("Yes.<|END_", ("", "Yes.<|END_")),
    ],
)
def test_marks_around_an_answer_are_no_part_of_it(text: str, expected: tuple[str, str], step: int) -> None:
    marks = next(marks for marks in MARKS if marks.answer)
    parser = AnswerParser(ReasoningSplitter(marks, opened=False))
    parts = [parser.push(text[i : i + step]) for i in range(0, len(text), step)] + [parser.finish()]
    assert ("".join(p.reasoning for p in parts), "".join(p.content for p in parts)) == expected


def test_a_call_ends_thoughts_of_apertus() -> None:
    dialect = Dialect.of("{{ tools }}<|tools_prefix|><|inner_prefix|><|inner_suffix|>", [])
    parser = AnswerParser(dialect.splitter("", {"f": None}), dialect.tool_parser({"f": None}))
    part = parser.push(f'<|inner_prefix|>Hm.{PREFIX}[{{"f": {{}}}}]{SUFFIX}')
    part.add(parser.finish())
    assert (part.reasoning, part.content, [call.name for call in part.calls if call.name]) == ("Hm.", "", ["f"])


# As DeepSeek's own templates join these texts. R1's shows calls only where the content is none, which never comes to it.
_BODIES = "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
JOINING = _BODIES + "".join(
    ("{{ m.content + '", CALLS, "' }}{% for t in m.tool_calls %}{{ '", CALL, "' + t.function.name + '", SEP,
     "' + t.function.arguments + '", CALL_END, "' }}{% endfor %}", CALLS_END,
     "{% else %}{{ m.role[0] + ':' + m.content }}{% endif %}{% endfor %}")
)  # fmt: skip
HIDING = "{% for m in messages %}{{ m.role[0] + ':' + m.content }}{% endfor %}{# " + CALLS + "\n```json #}"


def test_calls_in_the_prompts_of_deepseek(embedded_folder: Path) -> None:
    """Arguments are texts to V3.1's template; R1's gets calls in contents. Neither has a place for tools."""
    arguments = '{"a": "x", "b": [true, null]}'
    tools = [{"type": "function", "function": {"name": "f0", "parameters": {}}}]
    for source, form in ((JOINING, f"f0{SEP}{arguments}"), (HIDING, f"function{SEP}f0\n```json\n{arguments}\n```")):
        text = Templated(embedded_folder, source).render(HISTORY, tools=tools)
        assert f"{CALLS}{CALL}{form}{CALL_END}" in text
        assert "\nHi" not in text
        assert '<tools>\n{"type": "function", "function": {"name": "f0"' in text
        assert "in exactly this form:\n" + CALLS in text


def test_thoughts_that_a_template_calls_a_plan(embedded_folder: Path) -> None:
    source = "{{ tools }}<|START_ACTION|>{% for message in messages %}[{{ message.tool_plan }}]{% endfor %}"
    assert "[Hm.]" in Templated(embedded_folder, source).render(HISTORY)
