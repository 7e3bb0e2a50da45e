"""Whole texts beside grammars."""

from __future__ import annotations

import functools

from llguidance import LLMatcher, LLTokenizer


def takes(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    """Whether a text is one of the grammar's. Raises ValueError for a grammar that is refused."""
    matcher = _compiled(tokenizer, grammar).deep_copy()
    tokens = tokenizer.tokenize_str(text)
    whole = matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens)
    return bool(whole and matcher.is_accepting())


@functools.lru_cache(maxsize=4)
def _compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher
