"""Messages and tools in the form that some chat templates need."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from server.text.calls.parser import in_json


def with_written_calls(message: Mapping[str, Any], write: Callable[[Sequence[tuple[str, Any]]], str]) -> dict[str, Any]:
    """A message with its calls in its content, for templates that do not show them. write: names and arguments as text."""
    written = dict(message)
    if calls := written.pop("tool_calls", ()):
        functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        written["content"] = f"{message.get('content') or ''}{write(functions)}"
    return written


def python_calls(calls: Sequence[tuple[str, Any]]) -> str:
    """Calls as LFM2 writes them."""
    return f"<|tool_call_start|>[{', '.join(_python_call(*call) for call in calls)}]<|tool_call_end|>"


def _python_call(name: str, arguments: Any) -> str:
    if not isinstance(arguments, dict):
        return f"{name}({arguments})"
    texts = (f"{key}={_python_value(value)}" for key, value in arguments.items())
    return f"{name}({', '.join(texts)})"


def _python_value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def with_argument_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message for templates that join the arguments of calls to other texts (DeepSeek's)."""
    calls = [
        {**call, "function": {**call["function"], "arguments": in_json(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def one_call_each(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for gpt-oss, whose template takes one call of a message, its result next, and thoughts or content with it."""
    result: list[dict[str, Any]] = []
    results = {message.get("tool_call_id"): message for message in messages if message["role"] == "tool"}
    placed = set()
    for message in messages:
        if message["role"] == "tool" and message.get("tool_call_id") in placed:
            continue
        if not message.get("tool_calls"):
            result.append(dict(message))
            continue
        texts = _joined(message.get("thinking"), message.get("content"))
        for i, call in enumerate(message["tool_calls"]):
            thinking = {"thinking": texts} if texts and i == 0 else {}
            result.append({"role": "assistant", "content": "", "tool_calls": [call], **thinking})
            if call["id"] in results and len(message["tool_calls"]) > 1:
                result.append(dict(results[call["id"]]))
                placed.add(call["id"])
    return result


def with_descriptions(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools for gpt-oss, whose template fails at a function without a description."""
    return [
        {**tool, "function": {**tool["function"], "description": tool["function"].get("description") or ""}}
        for tool in tools
    ]


def with_thought_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message for Gemma 4, whose template writes the content of one with calls behind their results, and ends the turn."""
    if not message.get("tool_calls") or not message.get("content"):
        return dict(message)
    return {
        **message,
        "content": "",
        "reasoning_content": _joined(message.get("reasoning_content"), message["content"]),
    }


def _joined(*texts: str | None) -> str:
    return "\n\n".join(filter(None, texts))
