"""The body of /v1/responses as the body of a chat."""

from __future__ import annotations

from typing import Any

from server.api.http.errors import bad_request, shown
from server.api.http.hints import SERVER_TOOLS
from server.api.http.ignored import ignore, ignore_others
from server.api.http.validation import wrong_type
from server.api.openai.conversation import read_role
from server.api.openai.image_parts import TranslatedImage

INPUT_SCHEMA = {
    "description": "A text, or items: messages, function_call, function_call_output, reasoning",
    "anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "object"}}],
}
_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def chat_document(asked: dict[str, Any]) -> dict[str, Any]:
    """The chat that a response asks for. Raises ApiError."""
    chat: dict[str, Any] = {
        key: asked[key]
        for key in ("model", "temperature", "top_p", "parallel_tool_calls", "speculation")
        if key in asked
    }
    if "max_output_tokens" in asked:
        chat["max_tokens"] = asked["max_output_tokens"]
    messages = _messages(asked.get("input"))
    if "instructions" in asked:
        messages.insert(0, {"role": "system", "content": asked["instructions"]})
    chat["messages"] = messages
    if "tools" in asked:
        offered = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(asked["tools"])]
        chat["tools"] = [tool for tool in offered if tool is not None]
    choice = asked.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        choice = _nested(choice)
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_nested(tool) if isinstance(tool, dict) else tool for tool in choice["tools"]]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    if choice is not None:
        chat["tool_choice"] = choice
    effort = asked.get("reasoning", {}).get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    form = asked.get("text", {}).get("format")
    if form is not None and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
    if form is not None:
        chat["response_format"] = form
    return chat


def _nested(named: dict[str, Any]) -> dict[str, Any]:
    """A chat's way to name a tool."""
    return {"type": named.get("type"), "function": {k: v for k, v in named.items() if k != "type"}}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any] | None:
    """A chat's tool; None for one that the provider's server would run, which the model is not told of."""
    kind = tool.get("type")
    if isinstance(kind, str) and kind.startswith(SERVER_TOOLS):
        ignore(f"tools[].{kind}", "this server runs no tools; the model is not told of it")
        return None
    if kind != "function":
        raise bad_request(
            f"Tools of type {shown(repr(tool.get('type')))} are not supported by this server (in '{where}').",
            f"{where}.type",
            "unsupported_parameter",
        )
    known = ("name", "description", "parameters", "strict")
    ignore_others(tool, ("type", *known), where)
    return {"type": "function", "function": {key: tool[key] for key in known if key in tool}}


def _messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong_type("input", "a string or an array", value)
    messages: list[dict[str, Any]] = []
    thoughts = ""
    for i, item in enumerate(value):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise wrong_type(where, "an object", item)
        match item.get("type", "message"):
            case "message":
                message = {
                    "role": read_role(item, where, _ROLES),
                    "content": _content(item.get("content"), f"{where}.content"),
                }
                if thoughts and message["role"] == "assistant":
                    message["reasoning_content"], thoughts = thoughts, ""
                messages.append(message)
            case "function_call":
                arguments = item.get("arguments")
                _check_strings(item, where, "call_id", "name", *(() if arguments is None else ("arguments",)))
                if not (messages and messages[-1]["role"] == "assistant"):
                    messages.append({"role": "assistant", "content": ""})
                    if thoughts:
                        messages[-1]["reasoning_content"], thoughts = thoughts, ""
                function = {"name": item.get("name"), "arguments": arguments}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                _check_strings(item, where, "call_id")
                content = _content(item.get("output"), f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case "reasoning":
                written = _content(item.get("content") or item.get("summary") or "", f"{where}.content")
                thoughts = written if isinstance(written, str) else ""
            case other:
                raise bad_request(
                    f"Items of type {shown(repr(other))} are not supported by this server (in '{where}').",
                    f"{where}.type",
                    "unsupported_parameter",
                )
    return messages


def _check_strings(item: dict[str, Any], where: str, *names: str) -> None:
    for name in names:
        if not isinstance(item.get(name), str):
            raise wrong_type(f"{where}.{name}", "a string", item.get(name))


def _content(value: Any, where: str) -> str | list[dict[str, Any]]:
    """The text of parts of any of their names, or a chat's parts where there are images among them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type(where, "a string or an array of content parts", value)
    parts = [_part(part, f"{where}[{i}]") for i, part in enumerate(value)]
    if any(isinstance(part, TranslatedImage) for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _part(part: Any, where: str) -> dict[str, Any]:
    match part:
        case {"type": str(kind), "text": str(text)} if kind in _TEXT_PARTS:
            return {"type": "text", "text": text}
        case {"type": "input_image", "image_url": str(url)}:
            ignore_others(part, ("type", "image_url", "detail", "file_id"), where)
            return TranslatedImage(url, part.get("detail"), where)
    raise bad_request(
        f"Invalid '{where}': only parts with text, and input_image with an 'image_url', are supported by this server.",
        where,
        "unsupported_parameter",
    )
