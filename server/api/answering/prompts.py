"""Prompts as texts or token ids, one or many: the `prompt` of /v1/completions and the `input` of /v1/embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.api.answering.limits import check_known, check_length
from server.api.answering.service import Backend
from server.api.http.errors import bad_request
from server.api.http.validation import wrong_type

_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
PROMPT_SCHEMA = {
    "description": "A text or its token ids, or several of either",
    "anyOf": [
        {"type": "string", "minLength": 1},
        _TOKEN_IDS,
        {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string", "minLength": 1}, _TOKEN_IDS]}},
    ],
}
"""JSON schema of such a field."""


def prompt_count(prompt: Any) -> int:
    """Number of prompts that the field holds; they are checked one by one later."""
    return len(prompt) if isinstance(prompt, list) and prompt and type(prompt[0]) is not int else 1


def encode_prompts(
    prompt: Any, backend: Backend, param: str, *, add_special_tokens: bool = True, prefix: str = ""
) -> list[list[int]]:
    """Token ids of each prompt in the field that errors call param; prefix is put in front of texts. Raises ApiError."""
    encoded = []
    for i, one in enumerate(_prompts_of(prompt, backend.limits.vocab_size, param)):
        if isinstance(one, str):
            check_length(backend, one, param)
            ids = backend.tokenizer.encode(prefix + one, add_special_tokens=add_special_tokens)
            where = param if isinstance(prompt, str) else f"{param}[{i}]"
            if not ids:
                raise bad_request(f"Invalid '{where}': it has no tokens.", where, "empty_prompt")
            check_known(backend, ids, where)
            encoded.append(ids)
        else:
            encoded.append(one)
    return encoded


def _prompts_of(prompt: Any, vocab_size: int, param: str) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise wrong_type(param, "a string or an array", prompt)
    if not prompt:
        raise bad_request(
            f"Invalid '{param}': expected an array with at least 1 element(s), but got 0.", param, "empty_array"
        )
    if type(prompt[0]) is int:
        return [_token_ids(prompt, vocab_size, param)]
    prompts: list[str | list[int]] = []
    for i, one in enumerate(prompt):
        if isinstance(one, list):
            prompts.append(_token_ids(one, vocab_size, f"{param}[{i}]"))
        elif isinstance(one, str):
            prompts.append(one)
        else:
            raise wrong_type(f"{param}[{i}]", "a string or an array of token ids", one)
    return prompts


def _token_ids(ids: Sequence[Any], vocab_size: int, where: str) -> list[int]:
    if not ids:
        raise bad_request(f"Invalid '{where}': it has no tokens.", where, "empty_array")
    for i, token_id in enumerate(ids):
        if type(token_id) is not int:
            raise wrong_type(f"{where}[{i}]", "an integer", token_id)
        if not 0 <= token_id < vocab_size:
            raise bad_request(
                f"Invalid '{where}[{i}]': {str(token_id)[:24]} is no token id; the vocabulary has {vocab_size} tokens.",
                f"{where}[{i}]",
                "value_out_of_range",
            )
    return list(ids)
