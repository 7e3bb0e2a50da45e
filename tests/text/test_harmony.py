"""gpt-oss' answers: thoughts, content and calls come out of its channels, however the text was cut."""

from __future__ import annotations

import json

import pytest
from llguidance import LLTokenizer

from server.text.answer import AnswerParser
from server.text.dialect import Dialect
from server.text.grammars.grammar import after_thoughts, as_content, either, json_grammar, tools_grammar
from tests.text.texts import takes

HARMONY = Dialect.of("<|start|>{{ m.role }}<|channel|>final<|message|>{{ tools }}", [])
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
THOUGHTS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x"}'
Outcome = tuple[str, str, list[tuple[str, str]]]
CASES: dict[str, Outcome] = {
    f"{THOUGHTS}<|channel|>final<|message|>Yes, 2 < 3.<|return|>": ("Hm.", "Yes, 2 < 3.", []),
    "<|channel|>final <|constrain|>json<|message|>{}": ("", "{}", []),
    f"{THOUGHTS}{CALL}<|call|>": ("Hm.", "", [("f", '{"a": "x"}')]),
    f"{THOUGHTS} to=functions.f<|channel|>commentary json<|message|>{{}}": ("Hm.", "", [("f", "{}")]),
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=f<|message|><|call|>": (
        "", "I look.", [("f", "{}")],
    ),
    "<|channel|>commentary to=python<|message|>1 + 1": ("1 + 1", "", []),
    CALL[:-3]: ("", "", [("f", '{"a": "')]),
    "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.": ("Hm.", "Yes.", []),
    "<|channel|>analysis<|message|>Hm": ("Hm", "", []),
    "<|channel|>anal": ("", "", []),
    "No channels <|": ("", "No channels <|", []),
}  # fmt: skip


def parse(text: str, step: int, prompt: str = PROMPT) -> Outcome:
    functions = {"f": None}
    parser = AnswerParser(HARMONY.splitter(prompt, functions), HARMONY.tool_parser(functions))
    thoughts, content, calls = "", "", {}
    for part in [*(parser.push(text[i : i + step]) for i in range(0, len(text), step)), parser.finish()]:
        thoughts, content = thoughts + part.reasoning, content + part.content
        for delta in part.calls:
            name, written = calls.get(delta.index, (delta.name or "", ""))
            calls[delta.index] = (name, written + delta.arguments)
    return thoughts, content, list(calls.values())


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
@pytest.mark.parametrize("text", CASES)
def test_answers(text: str, step: int) -> None:
    assert parse(text, step) == CASES[text]


def test_a_message_that_the_prompt_has_begun() -> None:
    assert parse(" it is.", 2, f"{PROMPT}<|channel|>final<|message|>So") == ("", " it is.", [])


def test_without_functions_calls_are_thoughts() -> None:
    parser = AnswerParser(HARMONY.splitter(PROMPT, {}))
    assert parser.push(CALL).reasoning == '{"a": "x"}'
    assert parser.thinking


def test_grammars(tokenizer: LLTokenizer) -> None:
    """Thoughts, or none, and then the form in the channel that it belongs to."""
    form = as_content(json_grammar({"enum": [1]}), HARMONY, lambda _: None)
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": {"enum": ["x"]}}, "required": ["a"]}}}
    grammar = either(form, tools_grammar(HARMONY, [tool], lambda _: None, several=True))
    whole = after_thoughts(grammar, HARMONY, lambda _: None, opened=False)
    for text in ("<|channel|>final<|message|>1", CALL):
        assert takes(tokenizer, whole, THOUGHTS + text), text
        assert takes(tokenizer, whole, text)
    for text in ("1", "<|channel|>final<|message|>2", CALL.replace("x", "y"), json.dumps({"a": "x"})):
        assert not takes(tokenizer, whole, text), text
