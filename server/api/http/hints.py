"""The table of hints: options that change nothing about an answer here, and are accepted from every client.

docs/api.md shows this table, and a test sends every entry of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from server.api.http.errors import bad_request
from server.api.http.ignored import ignore

Endpoint = Literal["chat", "completions", "responses", "messages", "embeddings"]

_OPENAI: tuple[Endpoint, ...] = ("chat", "completions", "responses")
_TEXT: tuple[Endpoint, ...] = ("chat", "completions")


@dataclass(frozen=True)
class Hint:
    """One option. path is dotted; [] after a name stands for every item of a list."""

    path: str
    endpoints: tuple[Endpoint, ...]
    reason: str
    example: Any
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing; they are not named. null is always one."""
    takes: Callable[[Any], bool] | None = None
    """Values that are hints; others change the answer and are refused by name. None: all are."""
    checked: bool = False
    """Whether the endpoint's schema has the field, too: its type is checked, then it has no effect."""
    unless_thinking: bool = False
    """Whether it is a hint only for models that cannot be told how much to think; other models are told."""


def _keeps_everything(value: Any) -> bool:
    edits = value.get("edits") if isinstance(value, dict) and value.keys() <= {"edits"} else None
    return value == {} or (
        isinstance(edits, list)
        and all(
            isinstance(edit, dict) and edit.get("type") == "clear_thinking_20251015" and edit.get("keep") == "all"
            for edit in edits
        )
    )


def _includes_no_logprobs(value: Any) -> bool:
    return isinstance(value, list) and "message.output_text.logprobs" not in value


def _called_directly(value: Any) -> bool:
    return isinstance(value, list) and "direct" in value


_CACHE = "prompts that begin alike are found without marks"
_TELEMETRY = "it is for the provider's own records"
_PLACE = "it is about the machine that serves, which has its own configuration"
_TIER = "requests are served in the order of arrival"
_STREAM = "streams carry tokens as they are generated"
_THINKING = "this model cannot be told how much to think"
_KEEP = "nothing is removed from a prompt; one that does not fit is refused"

HINTS: tuple[Hint, ...] = (
    Hint("user", (*_TEXT, "embeddings"), _TELEMETRY, "someone", checked=True),
    Hint("metadata", _TEXT, _TELEMETRY, {"a": "b"}, checked=True),
    Hint("metadata", ("messages",), _TELEMETRY, {"user_id": "someone"}, checked=True),
    Hint("safety_identifier", _OPENAI, _TELEMETRY, "someone", checked=True),
    Hint("client_metadata", ("responses",), _TELEMETRY, {"session": "1"}),
    Hint("prompt_cache_key", _OPENAI, _CACHE, "a", checked=True),
    Hint("prompt_cache_retention", _OPENAI, _CACHE, "24h", checked=True),
    Hint("cache_prompt", _TEXT, _CACHE, True),
    Hint("cache_control", ("messages",), _CACHE, {"type": "ephemeral"}, checked=True),
    Hint("system[].cache_control", ("messages",), _CACHE, {"type": "ephemeral"}),
    Hint("tools[].cache_control", ("messages",), _CACHE, {"type": "ephemeral"}),
    Hint("messages[].content[].cache_control", ("messages", "chat"), _CACHE, {"type": "ephemeral"}),
    Hint("messages[].content[].content[].cache_control", ("messages",), _CACHE, {"type": "ephemeral"}),
    Hint("store", _TEXT, "answers are not stored", True, neutral=(False,)),
    Hint("store", ("responses",), "answers are not stored", True, neutral=(False,), checked=True),
    Hint("service_tier", _OPENAI, _TIER, "flex", neutral=("auto", "default")),
    Hint("service_tier", ("messages",), _TIER, "priority", neutral=("auto", "standard_only")),
    Hint("speed", ("messages",), _TIER, "fast", neutral=("standard",)),
    Hint("priority", _TEXT, _TIER, 3, neutral=(0,)),
    Hint("stream_options.include_obfuscation", _OPENAI, _STREAM, True, neutral=(False,)),
    Hint("return_progress", _TEXT, _STREAM, True, neutral=(False,)),
    Hint("timings_per_token", _TEXT, _STREAM, True, neutral=(False,)),
    Hint("prediction", ("chat",), "it would only make an answer faster", {"type": "content", "content": "a"}),
    Hint("verbosity", ("chat",), "models are not trained on it", "low", neutral=("medium",)),
    Hint("text.verbosity", ("responses",), "models are not trained on it", "low", neutral=("medium",)),
    Hint("reasoning.summary", ("responses",), "thoughts are returned as they are", "auto"),
    Hint("reasoning.generate_summary", ("responses",), "thoughts are returned as they are", "auto"),
    Hint("thinking.display", ("messages",), "thoughts are returned as they are", "summarized"),
    Hint("thinking.budget_tokens", ("messages", "chat"), "it is part of max_tokens and not kept for itself", 1024),
    Hint("include", ("responses",), "there is nothing of the kind", ["reasoning.encrypted_content"], ([],),
         takes=_includes_no_logprobs),
    Hint("max_tool_calls", ("responses",), "it bounds tools that the server runs; it runs none", 3),
    Hint("truncation", ("responses",), _KEEP, "auto", neutral=("disabled",)),
    Hint("context_management", ("messages",), _KEEP,
         {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, takes=_keeps_everything),
    Hint("tools[].eager_input_streaming", ("messages",), _STREAM, True, neutral=(False,)),
    Hint("tools[].defer_loading", ("messages",), "all tools are loaded", False, takes=lambda value: value is False),
    Hint("tools[].input_examples", ("messages",), "chat templates have no place for them", [{"city": "Rome"}]),
    Hint("tools[].allowed_callers", ("messages",), "only the model calls tools", ["direct"], takes=_called_directly),
    Hint("messages[].content[].citations", ("messages",), "answers cite nothing", {"enabled": False}),
    Hint("guided_decoding_backend", _TEXT, "there is one", "xgrammar"),
    Hint("keep_alive", _TEXT, _PLACE, "5m"),
    *(Hint(name, _TEXT, _PLACE, 1) for name in ("num_ctx", "num_batch", "num_thread", "num_gpu", "main_gpu")),
    *(Hint(name, _TEXT, _PLACE, True) for name in ("use_mmap", "use_mlock", "low_vram", "numa")),
    Hint("num_keep", _TEXT, _KEEP, 4),
    Hint("n_keep", _TEXT, _KEEP, 4),
    Hint("id_slot", _TEXT, _PLACE, 0, neutral=(-1,)),
    Hint("reasoning_effort", ("chat",), _THINKING, "low", ("none",), checked=True, unless_thinking=True),
    Hint("reasoning.effort", ("responses",), _THINKING, "low", ("none",), checked=True, unless_thinking=True),
    Hint("thinking", ("messages",), _THINKING, {"type": "adaptive"}, checked=True, unless_thinking=True),
    Hint("output_config.effort", ("messages",), _THINKING, "high", checked=True, unless_thinking=True),
)  # fmt: skip

SERVER_TOOLS = (
    "web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp", "namespace",
    "tool_search",
)  # fmt: skip
"""Types of tools of /v1/responses that the provider's server runs; they are dropped and named tools[].TYPE."""


def take_hints(endpoint: Endpoint, document: dict[str, Any], honoured: frozenset[str] = frozenset()) -> None:
    """Take an endpoint's hints out of a request's document and note them; those whose type is checked stay in it.

    honoured: paths that are no hints with this configuration. Raises ApiError (400) for a value that is no hint.
    """
    for hint in HINTS:
        if endpoint in hint.endpoints and not hint.unless_thinking and hint.path not in honoured:
            _take(hint, document, hint.path.split("."), "")


def _take(hint: Hint, holder: Any, path: list[str], where: str) -> None:
    name = path[0].removesuffix("[]")
    if not isinstance(holder, dict) or name not in holder:
        return
    value, place = holder[name], f"{where}{name}"
    if len(path) > 1:
        items = enumerate(value) if path[0].endswith("[]") and isinstance(value, list) else [(None, value)]
        for i, item in items:
            _take(hint, item, path[1:], f"{place}." if i is None else f"{place}[{i}].")
        return
    if not hint.checked:
        del holder[name]
    if value is None or any(type(value) is type(other) and value == other for other in hint.neutral):
        return
    if hint.takes is not None and not hint.takes(value):
        raise bad_request(f"This value of '{place}' is not supported by this server.", place, "unsupported_parameter")
    ignore(place, hint.reason)


def ignore_thinking(option: str) -> None:
    """Note an option about thinking that this model cannot be told."""
    ignore(option, _THINKING)
