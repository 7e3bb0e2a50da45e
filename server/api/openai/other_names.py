"""Options by the names and with the values that Ollama, llama.cpp, TGI, Mistral and OpenRouter give them, taken as ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from server.api.http.errors import bad_request

Value = Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _token_limit(value: Any) -> Any:
    """In Ollama and llama.cpp -1 is no limit and -2 fills the context; both mean the same as a missing limit here."""
    return None if type(value) is int and value in (-1, -2) else value


def _seed(value: Any) -> Any:
    """In llama.cpp and vLLM -1 is no seed."""
    return None if type(value) is int and value == -1 else value


def _biases(value: Any) -> Any:
    """llama.cpp has biases in a list; an empty one asks for none, as an empty object does."""
    return None if value == [] else value


def _effort_of_switch(value: Any) -> Any:
    """True and False as efforts; an effort stays one."""
    return {True: "medium", False: "none"}[value] if isinstance(value, bool) else value


def _effort_of_thinking(value: Any) -> Any:
    """{"type": "enabled"} and its like, as GLM and others have it."""
    match value:
        case {"type": "enabled" | "adaptive" | "auto", **rest} if not rest:
            return "medium"
        case {"type": "disabled", **rest} if not rest:
            return "none"
    raise ValueError("expected a type: enabled or disabled")


def _effort_of_reasoning(value: Any) -> Any:
    """OpenRouter's {"effort": ...} or {"enabled": ...}, whose "exclude" is false unless given."""
    if isinstance(value, dict):
        value = {key: given for key, given in value.items() if given is not None and (key, given) != ("exclude", False)}
    match value:
        case {"effort": effort, **rest} if rest in ({}, {"enabled": True}):
            return effort
        case {"enabled": bool(enabled), **rest} if not rest:
            return "medium" if enabled else "none"
        case dict() if not value:
            return None
    raise ValueError("expected effort or enabled")


def _form(value: Any) -> Any:
    """Ollama's format: "json" or a schema."""
    return {"type": "object"} if value == "json" else value


OTHER_NAMES: dict[str, tuple[str, Value]] = {
    "max_tokens": ("max_tokens", _token_limit),
    "seed": ("seed", _seed),
    "logit_bias": ("logit_bias", _biases),
    "repeat_penalty": ("repetition_penalty", _same),
    "num_predict": ("max_tokens", _token_limit),
    "n_predict": ("max_tokens", _token_limit),
    "max_new_tokens": ("max_tokens", _token_limit),
    "json_schema": ("guided_json", _same),
    "grammar": ("guided_grammar", _same),
    "regex": ("guided_regex", _same),
    "ebnf": ("guided_grammar", _same),
    "min_new_tokens": ("min_tokens", _same),
    "format": ("guided_json", _form),
    "random_seed": ("seed", _seed),
}
"""Options of chats and texts: the other name (or ours, if others write values of another kind), ours, and the meaning."""

OTHER_NAMES_CHAT: dict[str, tuple[str, Value]] = OTHER_NAMES | {
    "max_completion_tokens": ("max_completion_tokens", _token_limit),
    "think": ("reasoning_effort", _effort_of_switch),
    "enable_thinking": ("reasoning_effort", _effort_of_switch),
    "thinking": ("reasoning_effort", _effort_of_thinking),
    "reasoning": ("reasoning_effort", _effort_of_reasoning),
}


def take_other_names(document: dict[str, Any], names: dict[str, tuple[str, Value]]) -> dict[str, str]:
    """Give the options of a document this server's names; returns {this server's name: the client's}, also for no limit.

    Raises ApiError (400) where both names are given and say different things.
    """
    used: dict[str, str] = {}
    for other, (own, meaning) in names.items():
        if other not in document:
            continue
        written = document.pop(other)
        if written is None or (written == "" and other != own):
            continue
        try:
            value = meaning(written)
        except ValueError as e:
            raise bad_request(f"Invalid value for '{other}': {e}.", other, "invalid_value") from e
        if value is None:
            used.setdefault(own, other)
            continue
        if document.get(own) is not None and document[own] != value:
            before = used.get(own, own)
            raise bad_request(
                f"'{before}' and '{other}' say different things; set one of them.", other, "invalid_value"
            )
        document[own] = value
        used[own] = other
    return used
