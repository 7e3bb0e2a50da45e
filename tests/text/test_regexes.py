"""Regular expressions of JSON schemas keep their meaning in llguidance."""

from __future__ import annotations

import json
import re

import pytest
from llguidance import LLMatcher, LLTokenizer

from server.text.grammars.grammar import json_grammar, regex_grammar
from server.text.grammars.regexes import mend_regex
from server.text.grammars.schemas import mend_schema
from tests.text.texts import takes

VALUES = ['"', "\\", "\n", "\t", "a", "!", "é", "]", "^"]


@pytest.mark.parametrize(
    "pattern", [r'[^"]', r"[^\\]", r'[^"\\]', r'[^a-z"]', r'"|[^"a]', r"\[|[^\]\"]", r"[\^!]", r"."]
)
def test_the_grammar_takes_what_the_regex_takes(tokenizer: LLTokenizer, pattern: str) -> None:
    grammar = json_grammar({"type": "string", "pattern": f"^({pattern})$"})
    for value in VALUES:
        tokens = tokenizer.tokenize_str(json.dumps(value, ensure_ascii=False))
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        accepted = matcher.validate_tokens(tokens) == len(tokens)
        assert accepted == bool(re.fullmatch(pattern, value)), (pattern, value)


def test_only_negated_classes_change() -> None:
    assert mend_regex(r"^[a[^]\[^b]*[^c]\\[^\]d]$") == r"^[a[^]\[^b]*[^\x01c]\\[^\x01\]d]$"
    assert mend_regex("[^]a") == "[^]a"
    for pattern in ("", "\\", "[", "[^", "a[b", r"\[^a]"):
        mend_regex(pattern)


def test_only_patterns_change() -> None:
    schema = {
        "properties": {"pattern": {"type": "string", "pattern": "[^a]"}, "const": {"pattern": "[^a]"}},
        "patternProperties": {"[^b]": {"const": {"pattern": "[^c]"}}},
        "anyOf": [{"pattern": "[^d]"}, True],
        "default": {"pattern": "[^e]"},
    }
    assert mend_schema(schema) == {
        "properties": {"pattern": {"type": "string", "pattern": "[^\\x01a]"}, "const": {"pattern": "[^\\x01a]"}},
        "patternProperties": {"[^\\x01b]": {"const": {"pattern": "[^c]"}}},
        "anyOf": [{"pattern": "[^\\x01d]"}, True],
        "default": {"pattern": "[^e]"},
    }


def test_classes_are_ascii_unless_asked_otherwise(tokenizer: LLTokenizer) -> None:
    for pattern, yes, no in (
        (r"\d", "7", "٣"), (r"\w", "_", "é"), (r"a\sb", "a b", "a\u2003b"), (r"[\d.]{2}", "1.", "١."), (r"\\d", "\\d", "1"),
    ):  # fmt: skip
        assert takes(tokenizer, regex_grammar(pattern), yes), pattern
        assert not takes(tokenizer, regex_grammar(pattern), no), pattern
    for pattern, text in ((r"(?u)\d", "٣"), (r"(?u:\w)", "é"), (r"\p{Nd}", "٣"), (r"\D", "é"), (r"\W", "é")):
        assert takes(tokenizer, regex_grammar(pattern), text), pattern


def test_patterns_of_schemas_have_ascii_classes(tokenizer: LLTokenizer) -> None:
    for pattern, yes, no in (
        (r"^\d$", "7", "٣"),
        (r"^[\w-]$", "-", "é"),
        (r"^[^\d]$", "é", "4"),
        (r"^\\d$", "\\d", "1"),
    ):
        grammar = json_grammar({"type": "string", "pattern": pattern})
        assert takes(tokenizer, grammar, json.dumps(yes, ensure_ascii=False)), pattern
        assert not takes(tokenizer, grammar, json.dumps(no, ensure_ascii=False)), pattern


def test_json_is_on_one_line_with_one_space_at_most(tokenizer: LLTokenizer) -> None:
    grammar = json_grammar({"type": "object"})
    for text in ('{"a": 1, "b": [1, {"c": null}]}', '{"a":1,"b":[1,{"c":null}]}', "{}"):
        assert takes(tokenizer, grammar, text)
    for text in (
        '{"a"\n                    : 1}',
        '{"a" : 1}',
        '{"a":  1}',
        '{ "a": 1}',
        '{"a":\n1}',
        '{"a": 1,  "b": 2}',
    ):
        assert not takes(tokenizer, grammar, text), text
