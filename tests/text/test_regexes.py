"""Regular expressions of JSON schemas keep their meaning in llguidance."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from server.text.grammar import json_grammar
from server.text.regexes import mend_regex, mend_regexes

VALUES = ['"', "\\", "\n", "\t", "a", "!", "é", "]", "^"]


@pytest.fixture(scope="module")
def tokenizer(embedded_folder: Path) -> LLTokenizer:
    return LLTokenizer((embedded_folder / "tokenizer.json").read_text())


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
        "properties": {"pattern": {"type": "string", "pattern": "[^a]"}, "const": {"enum": ["[^a]"]}},
        "patternProperties": {"[^b]": {"const": {"pattern": "[^c]"}}},
        "anyOf": [{"pattern": "[^d]"}, True],
        "default": {"pattern": "[^e]"},
    }
    assert mend_regexes(schema) == {
        "properties": {"pattern": {"type": "string", "pattern": "[^\\x01a]"}, "const": {"enum": ["[^a]"]}},
        "patternProperties": {"[^\\x01b]": {"const": {"pattern": "[^c]"}}},
        "anyOf": [{"pattern": "[^\\x01d]"}, True],
        "default": {"pattern": "[^e]"},
    }
