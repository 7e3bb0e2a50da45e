"""Sequences under a grammar: what comes out matches it, neighbours are left alone, a broken grammar ends alone."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import pytest
import torch
from llguidance import LLMatcher

from server.engine.grammar import GrammarError, Grammars
from server.engine.runtime.sampling import sample
from server.engine.scheduling.sequence import Sequence
from server.text.tokenizer import Tokenizer
from server.types import GenerateRequest, SamplingParams

VOCABULARY, END = 49152, 2
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "日本"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars(embedded_folder: Path) -> Grammars:
    return Grammars(embedded_folder, VOCABULARY, END)


def sequence(grammars: Grammars, grammar: str | None, seed: int, **options: object) -> Sequence:
    sampling = SamplingParams(max_tokens=200, temperature=1.0, grammar=grammar, **options)  # type: ignore[arg-type]
    made = Sequence(GenerateRequest(str(seed), [1, 5], sampling), seed, frozenset({END}))
    made.constraint = grammars.start(grammar) if grammar is not None else None
    return made


def test_random_logits_give_what_the_schema_allows(grammars: Grammars, embedded_folder: Path) -> None:
    tokenizer = Tokenizer.load(embedded_folder)
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA, defaults={"whitespace_flexible": False})
    random.seed()
    rows = [sequence(grammars, grammar, random.getrandbits(32), ignore_eos=i == 1) for i in range(3)]
    free = sequence(grammars, None, 9)
    for _ in range(60):
        running = [s for s in rows if s.finish_reason is None]
        logits = torch.randn(len(running) + 1, VOCABULARY) * 3
        for chosen, result in zip([*running, free], sample(logits, [*running, free]), strict=True):
            assert result.error is None
            chosen.append(result.token, 4096)
    for ended in rows:
        assert ended.finish_reason == "stop"
        text = tokenizer.decode(ended.tokens[2:])
        jsonschema.validate(json.loads(text), SCHEMA)
    assert free.num_generated == 60 or free.finish_reason == "stop"


def test_the_end_may_come_only_where_the_text_may_end(grammars: Grammars) -> None:
    wanting = sequence(grammars, LLMatcher.grammar_from_regex("[ab]{4,}"), 1)
    for _ in range(8):
        logits = torch.zeros(1, VOCABULARY)
        logits[0, END] = 100.0
        token = sample(logits, [wanting])[0].token
        wanting.append(token, 4096)
        if token == END:
            break
    assert wanting.finish_reason == "stop"
    assert wanting.num_generated >= 2


def test_broken_grammar(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match="regex"):
        grammars.compile(LLMatcher.grammar_from_regex("(a")).result()
    with pytest.raises(GrammarError):
        grammars.start("{").allowed()
    endless = LLMatcher.grammar_from_json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})
    with pytest.raises(GrammarError, match="no text matches it"):
        grammars.compile(endless).result()
