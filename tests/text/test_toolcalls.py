"""Tool calls and thoughts come out the same however the text was cut; what is no call stays text."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.answer import AnswerParser
from server.text.calls.json_calls import JsonToolParser
from server.text.calls.marked_calls import MarkedToolParser, read_gemma_call, read_python_calls
from server.text.calls.named_calls import MISTRAL, NamedToolParser
from server.text.calls.parser import ToolParser
from server.text.calls.tagged_calls import GLM, MINIMAX, SEED, XML, TaggedToolParser
from server.text.reasoning import MARKS, ReasoningSplitter
from tests.marks import with_rest


def hermes() -> ToolParser:
    return JsonToolParser("<tool_call>", "</tool_call>")


def llama() -> ToolParser:
    return JsonToolParser("<|python_tag|>", None, bare=("f", "g"))


def gemma() -> ToolParser:
    return MarkedToolParser(
        "<start_function_call>", "<end_function_call>", lambda body: read_gemma_call(body, "<escape>")
    )


PARAMETERS = {"type": "object", "properties": {
    "a": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}, "b": {"type": "boolean"},
    "u": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "e": {"enum": ["1", "2"]},
}}  # fmt: skip


def xml() -> ToolParser:
    return TaggedToolParser(XML, {"f": PARAMETERS, "g": None})


def xml_call(name: str = "f", **arguments: object) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def glm() -> ToolParser:
    return TaggedToolParser(GLM, {"f": PARAMETERS, "g": None})


def seed() -> ToolParser:
    return TaggedToolParser(SEED, {"f": PARAMETERS})


def minimax() -> ToolParser:
    return TaggedToolParser(MINIMAX, {"f": PARAMETERS, "g": None})


def nemotron() -> ToolParser:
    return JsonToolParser("<TOOLCALL>", "</TOOLCALL>")


def lfm2() -> ToolParser:
    return MarkedToolParser("<|tool_call_start|>", "<|tool_call_end|>", read_python_calls)


def mistral() -> ToolParser:
    return NamedToolParser(MISTRAL)


Outcome = tuple[str, list[tuple[str, str]]]
NESTED = "[" * 2000 + "]" * 2000
"""An array that is nested more deeply than Python reads."""


def parse(parser: ToolParser, text: str, step: int) -> Outcome:
    content, calls, ids = "", {}, set()
    pieces = [parser.push(text[i : i + step]) for i in range(0, len(text), step)] + [parser.finish()]
    for part, deltas in pieces:
        content += part
        for delta in deltas:
            if delta.index not in calls:
                assert delta.id
                assert delta.name
                ids.add(delta.id)
                calls[delta.index] = [delta.name, ""]
            else:
                assert delta.id is None
                assert delta.name is None
            calls[delta.index][1] += delta.arguments
    assert len(ids) == len(calls)
    assert list(calls) == list(range(len(calls)))
    return content, [(name, arguments) for name, arguments in calls.values()]


CASES: list[tuple[Callable[[], ToolParser], str, Outcome]] = [
    (hermes, "Sure. <tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"<x> {\"}}\n</tool_call>",
     ("Sure. ", [("f", '{"a": "<x> {"}')])),
    (hermes, '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"arguments": {"b": [1]}, "name": "g"}'
     "</tool_call>", ("", [("f", "{}"), ("g", '{"b": [1]}')])),
    (hermes, '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call> end',
     ("end", [("f", "{}"), ("g", "{}")])),
    (hermes, '<tool_call>{"type": "function", "function": {"name": "f", "arguments": "{\\"a\\":1}"}}</tool_call>',
     ("", [("f", '{"a":1}')])),
    *((hermes, f'<tool_call>{{"name": "f", "arguments": {none}}}</tool_call>', ("", [("f", "{}")]))
      for none in ('""', '" "', "null", '"null"', "{}", '"{}"')),
    (hermes, '<tool_call>{"function": {"name": "f", "arguments": ""}}</tool_call>', ("", [("f", "{}")])),
    (hermes, '<tool_call>{"name": "f", "arguments": {"a": 1', ("", [("f", '{"a": 1')])),
    (hermes, '<tool_call>{"name": "f", "argum', ("", [])),
    (hermes, "<tool_call>no json</tool_call>", ("<tool_call>no json</tool_call>", [])),
    (hermes, "<tool_call>\n[ no json</tool_call>", ("<tool_call>\n[ no json</tool_call>", [])),
    (hermes, "<tool_call>", ("<tool_call>", [])),
    (hermes, "a <tool_call>\n", ("a <tool_call>\n", [])),
    (hermes, "<tool_call>[]\n</tool_call>, <tool_call></tool", ("<tool_call>[]\n</tool_call>, <tool_call></tool", [])),
    (hermes, "<tool_call><tool_call> {", ("<tool_call><tool_call> {", [])),
    (hermes, '<tool_call>{"name": "f", "arguments": {}}, ]</tool_call><tool_call></tool_call>',
     ("<tool_call></tool_call>", [("f", "{}")])),
    (hermes, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool', ("", [("f", "{}")])),
    (hermes, "a < b <tool", ("a < b <tool", [])),
    (hermes, "no calls", ("no calls", [])),
    (llama, '{"name": "f", "parameters": {"q": "x"}}', ("", [("f", '{"q": "x"}')])),
    (llama, '<|python_tag|>{"name": "f", "parameters": {"q": "x"}}; {"name": "g", "parameters": {}}',
     ("", [("f", '{"q": "x"}'), ("g", "{}")])),
    (llama, '{"parameters": {"q": "x"}, "name": "f"}', ("", [("f", '{"q": "x"}')])),
    (llama, '{"type": "function", "function": {"name": "g", "parameters": {"q": 1}}}', ("", [("g", '{"q": 1}')])),
    (llama, '{"name": "f", "parameters": "{\\"q\\": 1}"}', ("", [("f", '{"q": 1}')])),
    (llama, '<|python_tag|>{"name": "unknown", "parameters": [1]} {"name": "other"}',
     ("", [("unknown", "[1]"), ("other", "{}")])),
    (llama, '{"name": "f", "parameters": {}}; {"name": "Ann", "age": 31}', ('{"name": "Ann", "age": 31}', [("f", "{}")])),
    *((llama, text, (text, [])) for text in (
        '{"name": "Ann", "age": 31}', '{"age": 31, "name": "Ann"}', '{"name": "Ann", "parameters": {"x": 1}} and so on',
        '{"name": "f"}', '{"name": "f", "age": 31}', '{"name": "f", "parameters": [1]}', '{"parameters": [1], "name": "f"}',
        '{"name": "f", "parameters": null}', '{"name": "f", "parameters": "[1]"}', '{"parameters": 3, "name": "f"}',
        '{"function": {"name": "Ann"}}', '{"function": {"name": "Ann", "parameters": {}}}', '{"function": {"name": "f"}}',
        '{"name": "Ann", "age"', '{"person": {"name": "f", "parameters": {}}}', '{"name": 3, "parameters": {}}',
    )),
    (llama, "{x} is a set", ("{x} is a set", [])),
    (llama, "\n{x} is a set", ("\n{x} is a set", [])),
    (llama, "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    (llama, "Here: {}", ("Here: {}", [])),
    (mistral, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
     ("", [("f", '{"a": 1}'), ("g", "{}")])),
    (mistral, 'Hm.[TOOL_CALLS]f[ARGS]{"a": "}"}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}',
     ("Hm.", [("f", '{"a": "}"}'), ("g", "{}")])),
    (mistral, '[TOOL_CALLS]f[ARGS]{"name": 3, "b": "\\"}"}', ("", [("f", '{"name": 3, "b": "\\"}"}')])),
    (mistral, '[TOOL_CALLS]f[ARGS]{"a": [1', ("", [("f", '{"a": [1')])),
    (mistral, "[TOOL_CALLS]f[ARG", ("[TOOL_CALLS]f[ARG", [])),
    (mistral, "plain [text]", ("plain [text]", [])),
    (gemma, "<start_function_call>call:f{a:<escape>x: {y}<escape>,b:[1,2],c:{d:true}}<end_function_call>",
     ("", [("f", '{"a": "x: {y}", "b": [1, 2], "c": {"d": true}}')])),
    (xml, "Sure.\n" + xml_call(a='x "y"\n</z>\n', n=3, o='{"k": [1]}', u="null", b=True, e=1) + "\n" + xml_call("g"),
     ("Sure.\n", [("f", '{"a": "x \\"y\\"\\n</z>\\n", "n": 3, "o": {"k": [1]}, "u": null, "b": true, "e": "1"}'),
                  ("g", "{}")])),
    (xml, xml_call(n=4).replace("</tool_call>", xml_call("g", z="[1").removeprefix("<tool_call>\n")) + " bye",
     ("bye", [("f", '{"n": 4}'), ("g", '{"z": "[1"}')])),
    (xml, "<function=f>\n<parameter=a>12</parameter></function>", ("", [("f", '{"a": "12"}')])),
    (xml, '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>', ("", [("f", '{"a": "b"}')])),
    (xml, '<tool_call>\n<function=f>\n<parameter=a>\ncut "', ("", [("f", '{"a": "cut \\"')])),
    *((xml, text, (text, [])) for text in (
        "<function=h>\n</function>", "<function=", "<function=" + "x" * 300, "a <function=\n>"
    )),
    (xml, "<tool_call>nothing</tool_call> and <function=h>", ("<tool_call>nothing</tool_call> and <function=h>", [])),
    (xml, "<tool_call>\n<func", ("<tool_call>\n<func", [])),
    (glm, "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x\ny</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n"
     "</tool_call><tool_call>g</tool_call>", ("", [("f", '{"a": "x\\ny", "n": 3}'), ("g", "{}")])),
    (seed, "<seed:tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=n>3</parameter>\n</function>\n"
     "</seed:tool_call>", ("", [("f", '{"a": "\\nx\\n", "n": 3}')])),
    (minimax, '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n'
     '<parameter name="o">{}</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
     ("", [("f", '{"a": "1", "o": {}}'), ("g", "{}")])),
    (nemotron, '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": "{}"}]</TOOLCALL>',
     ("", [("f", '{"a": 1}'), ("g", "{}")])),
    (lambda: JsonToolParser("<|tool_call|>", None), '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]\n',
     ("", [("f", '{"a": 1}'), ("g", "{}")])),
    (lfm2, "ok <|tool_call_start|>[f(a='x', o={\"k\": true, 'z': None}, l=[1, -2.5]), c.d(a=\"]\")]<|tool_call_end|>",
     ("ok ", [("f", '{"a": "x", "o": {"k": true, "z": null}, "l": [1, -2.5]}'), ("c.d", '{"a": "]"}')])),
    *((lfm2, text, (text, [])) for text in (
        f"<|tool_call_start|>{body}<|tool_call_end|>" for body in (
            "[f(1)]", "[f(a=__import__('os'))]", "f(", "[]", "[f, 1]", "[f(a={[1]})]", "f(a=1e999)",
            '[{"name": 5, "arguments": {}}]',
        )
    )),
    # Halves of surrogate pairs, which no answer in UTF-8 can have.
    (lfm2, '<|tool_call_start|>[f(a="\\udc00")]<|tool_call_end|>', ("", [("f", '{"a": "\\udc00"}')])),
    (gemma, '<start_function_call>call:f{a:"\\udc00"}<end_function_call>', ("", [("f", '{"a": "\\udc00"}')])),
    (hermes, '<tool_call>{"name": "\\udc00", "arguments": "\\udc00"}</tool_call>', ("", [("\\udc00", "\\udc00")])),
    (hermes, '<tool_call>{"function": {"name": "\\udc00", "arguments": "{}"}}</tool_call>', ("", [("\\udc00", "{}")])),
    *((make, text, (text, [])) for make, text in (
        (gemma, f"<start_function_call>call:f{{a:{NESTED}}}<end_function_call>"),
        (gemma, "<start_function_call>call:f{a:NaN}<end_function_call>"),
        (lfm2, f"<|tool_call_start|>{NESTED}<|tool_call_end|>"),
        (llama, f'<|python_tag|>{{"a": {NESTED}}}'),
    )),
    (gemma, "<start_function_call>nothing<end_function_call>", ("<start_function_call>nothing<end_function_call>", [])),
]  # fmt: skip


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("make", "text", "expected"), CASES, ids=[case[1][:40] for case in CASES])
def test_calls(make: Callable[[], ToolParser], text: str, expected: Outcome, step: int) -> None:
    assert parse(make(), text, step) == expected


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ),
    step=st.integers(1, 9),
)
@settings(deadline=None)
def test_any_arguments(value: object, step: int) -> None:
    arguments = json.dumps({"v": value}, ensure_ascii=False)
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    assert parse(hermes(), text, step) == ("", [("f", arguments)])


@given(text=st.text('<>/tol_ca{}[]": nme\n', max_size=60), step=st.integers(1, 5))
@settings(deadline=None)
def test_nothing_gets_lost_or_raises(text: str, step: int) -> None:
    for make in (hermes, llama, mistral, gemma, xml, lfm2):
        content, calls = parse(make(), text, step)
        assert calls or make is mistral or content.strip() == text.strip()


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize(
    ("opened", "text", "expected"),
    [
        (False, "<think>\nHm.\n</think>\n\nYes.", ("\nHm.\n", "Yes.")),
        (True, "Hm.</think>Yes.", ("Hm.", "Yes.")),
        (False, "No thoughts <think> here", ("", "No thoughts <think> here")),
        (False, "<thin", ("", "<thin")),
        (True, "never ends </thi", ("never ends </thi", "")),
        (False, "  <think>a</think>", ("a", "")),
        # Models forget the end of their thoughts, in front of a call of a function that there is.
        (
            True,
            "Is it <tool_call>? <tool_call>\n<function=f>\n",
            ("Is it <tool_call>? ", "<tool_call>\n<function=f>\n"),
        ),
    ],
)
def test_reasoning(opened: bool, text: str, expected: tuple[str, str], step: int) -> None:
    parser = AnswerParser(ReasoningSplitter(MARKS[0], opened=opened, call="<tool_call>\n<function="))
    parts = [parser.push(text[i : i + step]) for i in range(0, len(text), step)] + [parser.finish()]
    assert ("".join(p.reasoning for p in parts), "".join(p.content for p in parts)) == expected


LONG = {
    "hermes": (hermes, '<tool_call>{"name": "f", "arguments": ARGUMENTS}</tool_call>'),
    "name last": (hermes, '<tool_call>{"arguments": ARGUMENTS, "name": "f"}</tool_call>'),
    "a string": (hermes, '<tool_call>{"name": "f", "arguments": ESCAPED}</tool_call>'),
    "no call": (llama, '{"arguments": ARGUMENTS, "name": "Ann"}'),
    "llama": (llama, '{"name": "f", "parameters": ARGUMENTS}'),
    "mistral": (mistral, '[TOOL_CALLS][{"name": "f", "arguments": ARGUMENTS}]'),
    "named mistral": (mistral, "[TOOL_CALLS]f[ARGS]ARGUMENTS"),
    "gemma": (gemma, "<start_function_call>call:f{a:<escape>VALUE<escape>}<end_function_call>"),
    "xml": (xml, xml_call(a="VALUE")),
    "xml's object": (
        xml,
        "<tool_call>\n<function=f>\n<parameter=o>\nARGUMENTS\n</parameter>\n</function>\n</tool_call>",
    ),
}


@pytest.mark.parametrize(
    ("kind", "step"),
    with_rest(itertools.product(LONG, (100, 10**6)), lambda case: case[1] == 100 or case[0] == "hermes"),
)
def test_long_arguments_take_time_in_proportion(kind: str, step: int) -> None:
    """An agent writes whole files in a call, and all streams wait while it is read."""
    make, form = LONG[kind]

    def seconds(length: int) -> float:
        value = ('if (a) { b = "c"; }\n' * (length // 20))[:length]
        arguments = json.dumps({"a": value})
        text = form.replace("ESCAPED", json.dumps(arguments)).replace("ARGUMENTS", arguments).replace("VALUE", value)
        pieces = [text[i : i + step] for i in range(0, len(text), step)]
        best = 60.0
        for _ in range(2):
            parser = AnswerParser(tools=make(), forced=True)
            start = time.thread_time()
            for piece in pieces:
                parser.push(piece)
            parser.finish()
            best = min(best, time.thread_time() - start)
        return best

    assert seconds(200_000) < 8 * seconds(50_000) + 0.01


def test_a_single_call() -> None:
    parser = AnswerParser(None, hermes(), single_call=True)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert [delta.index for delta in parser.push(call * 3).calls] == [0]
    assert parser.called


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "f", "arguments": {"a": 2}}\n</tool_call>'


def forced(text: str, step: int) -> tuple[str, list[tuple[str, str]], bool]:
    """(content, calls, whether it repeats itself) of an answer that has to be calls."""
    parser = AnswerParser(tools=hermes(), forced=True)
    content, calls = "", {}
    for part in [*(parser.push(text[i : i + step]) for i in range(0, len(text), step)), parser.finish()]:
        content += part.content
        for delta in part.calls:
            name, written = calls.get(delta.index, (delta.name, ""))
            calls[delta.index] = (name, written + delta.arguments)
    assert list(calls) == list(range(len(calls)))
    return content, list(calls.values()), parser.repeated


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_a_forced_answer_that_is_cut_has_no_markup_and_no_empty_call(step: int) -> None:
    for end in range(len(CALL) + 1):
        content, calls, repeated = forced(CALL[:end], step)
        assert (content, repeated) == ("", False)
        begun = '"arguments": {' in CALL[:end]
        assert len(calls) == begun
        assert all(name == "f" and '{"a": 1}'.startswith(written) and written for name, written in calls)


def test_a_forced_call_with_an_argument_called_name_is_complete() -> None:
    calls = [CALL.replace('"a": 1', f'"name": {i}') for i in (1, 2)]
    assert forced("\n".join(calls), 3) == ("", [("f", '{"name": 1}'), ("f", '{"name": 2}')], False)


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_a_forced_answer_does_not_repeat_a_call(step: int) -> None:
    one, two = ("f", '{"a": 1}'), ("f", '{"a": 2}')
    assert forced(f"{CALL}\n{OTHER}", step) == ("", [one, two], False)
    assert forced(f"{CALL}\n{CALL}\n{OTHER}", step) == ("", [one], True)
    assert forced(f"{CALL}\n{OTHER}\n{CALL.replace('1', ' 1')}", step) == ("", [one, two], True)
    # A second call that was cut is no call.
    assert forced(f"{CALL}\n{OTHER[:46]}", step) == ("", [one], False)
