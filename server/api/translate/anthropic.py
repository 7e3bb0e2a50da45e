"""The body of /v1/messages as the body of a chat."""

from __future__ import annotations

import json
from typing import Any

from server.api.http.errors import bad_request, not_supported, shown
from server.api.http.hints import ignore_thinking
from server.api.http.ignored import ignore, ignore_others
from server.api.openai.image_parts import TranslatedImage

_NEEDED = {
    "text": "a string 'text'",
    "thinking": "a string 'thinking'",
    "tool_use": "strings 'id' and 'name' and an object 'input'",
    "tool_result": "a string 'tool_use_id'",
}
_BILLING = "x-anthropic-billing-header:"


def chat_document(asked: dict[str, Any], *, can_think: bool) -> dict[str, Any]:
    """The chat that a message request asks for. Raises ApiError."""
    same = ("model", "max_tokens", "temperature", "top_p", "top_k")
    chat: dict[str, Any] = {key: asked[key] for key in same if key in asked}
    messages: list[dict[str, Any]] = []
    if "system" in asked:
        messages.append({"role": "system", "content": _texts(_without_billing(asked["system"]), "system")})
    for i, message in enumerate(asked["messages"]):
        messages += _message(message, f"messages[{i}]")
    chat["messages"] = messages
    if messages[-1]["role"] == "assistant":
        chat["continue_final_message"] = True  # Anthropic's way to begin the answer
    if "stop_sequences" in asked:
        chat["stop"] = asked["stop_sequences"]
    if "tools" in asked:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(asked["tools"])]
    chat |= _choice(asked.get("tool_choice", {}))
    chat |= _form(asked.get("output_config", {}).get("format"))
    return chat | _effort(asked, can_think=can_think)


def take_older_names(document: dict[str, Any]) -> None:
    """Put output_format, as output_config.format was called before, where it is now. Raises ApiError for two forms."""
    config = document.get("output_config")
    if document.get("output_format") is None or not isinstance(config, dict | None):
        return
    form, config = document.pop("output_format"), config or {}
    if config.get("format") not in (None, form):
        text = "'output_format' and 'output_config.format' are two names of one option; give one of them."
        raise bad_request(text, "output_format", "invalid_value")
    document["output_config"] = {**config, "format": form}


def _effort(asked: dict[str, Any], *, can_think: bool) -> dict[str, Any]:
    """reasoning_effort, from thinking and output_config.effort; nothing where the model cannot be told."""
    kind, effort = asked.get("thinking", {}).get("type"), asked.get("output_config", {}).get("effort")
    if kind not in (None, "disabled", "enabled", "adaptive"):
        raise bad_request(f"Invalid value for 'thinking.type': {shown(repr(kind))}.", "thinking.type", "invalid_value")
    if not can_think:
        if kind in ("enabled", "adaptive"):
            ignore_thinking("thinking")
        if effort is not None:
            ignore_thinking("output_config.effort")
        return {}
    if kind == "disabled":
        return {"reasoning_effort": "none"}
    if effort is not None:
        return {"reasoning_effort": "xhigh" if effort == "max" else effort}
    return {} if kind is None else {"reasoning_effort": "medium"}


def _form(asked: Any) -> dict[str, Any]:
    match asked:
        case None:
            return {}
        case {"type": "json_schema", "schema": dict(schema)} if len(asked) == 2:
            named = {"name": "answer", "schema": schema, "strict": True}
            return {"response_format": {"type": "json_schema", "json_schema": named}}
    where = "output_config.format"
    raise bad_request(f"Invalid '{where}': expected 'type' json_schema and a 'schema'.", where, "invalid_value")


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if choice.get("disable_parallel_tool_use"):
        result["parallel_tool_calls"] = False
    match choice.get("type"):
        case None | "auto":
            pass
        case "none":
            result["tool_choice"] = "none"
        case "any":
            result["tool_choice"] = "required"
        case "tool" if isinstance(choice.get("name"), str):
            result["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
        case _:
            raise bad_request("Invalid value for 'tool_choice'.", "tool_choice", "invalid_value")
    return result


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise not_supported(f"{where}.type", f"A tool of type {shown(repr(tool['type']))}")
    names = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    ignore_others(tool, ("type", *names), where)
    return {"type": "function", "function": {names[key]: value for key, value in tool.items() if key in names}}


def _message(message: Any, where: str) -> list[dict[str, Any]]:
    """One message, and before it one of the role tool for each tool_result in it."""
    match message:
        case {"role": "system", "content": content}:
            return [{"role": "system", "content": _texts(content, f"{where}.content")}]
        case {"role": "user" | "assistant" as role, "content": str(content)}:
            return [{"role": role, "content": content}]
        case {"role": "user" | "assistant" as role, "content": [*blocks]} if blocks:
            pass
        case _:
            raise bad_request(
                f"Invalid '{where}': expected an object with 'role' ('user', 'assistant' or 'system') and 'content' (a "
                "string or an array of blocks).",
                where,
                "invalid_value",
            )
    made: dict[str, Any] = {"role": role}
    results: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        _read_block(block, role, f"{where}.content[{i}]", made, results)
    if role == "user" and len(made) == 1:
        return results
    return [*results, {"content": "", **made}]


def _read_block(block: Any, role: str, param: str, made: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Put one block into the message, or into the results of tools before it."""
    match role, block:
        case _, {"type": "text", "text": str(text)}:
            _add_text(made, text)
        case "user", {"type": "document"}:
            _add_text(made, _document(block, param))
        case "user", {"type": "image"}:
            content = made.get("content", [])
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            made["content"] = [*parts, _image(block, param)]
        case "assistant", {"type": "redacted_thinking"}:
            ignore(f"{param}.redacted_thinking", "only its provider can read it")
        case "assistant", {"type": "thinking", "thinking": str(text)}:
            made["reasoning_content"] = made.get("reasoning_content", "") + text
        case "assistant", {
            "type": "tool_use",
            "id": str(call_id),
            "name": str(name),
            "input": dict() | None | "" as given,
        }:
            function = {"name": name, "arguments": json.dumps(given or {}, ensure_ascii=False)}
            made.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        case "user", {"type": "tool_result", "tool_use_id": str(call_id)}:
            content = _result(block.get("content") or "", f"{param}.content", bool(block.get("is_error")))
            results.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case (
            (_, {"type": "text" as kind})
            | ("assistant", {"type": "tool_use" | "thinking" as kind})
            | ("user", {"type": "tool_result" as kind})
        ):
            raise bad_request(
                f"Invalid '{param}': a block of type '{kind}' needs {_NEEDED[kind]}.", param, "invalid_value"
            )
        case _, {"type": str(kind)}:
            raise not_supported(param, f"A block of type {shown(repr(kind))} here")
        case _:
            raise bad_request(f"Invalid '{param}': expected a content block.", param, "invalid_value")


def _add_text(made: dict[str, Any], text: str) -> None:
    """Put a text behind what a message has already."""
    content = made.get("content")
    if isinstance(content, list):
        content.append({"type": "text", "text": text})
    else:
        made["content"] = text if content is None else f"{content}\n{text}"


def _image(block: dict[str, Any], where: str) -> TranslatedImage:
    match block.get("source"):
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            return TranslatedImage(f"data:{kind};base64,{data}", None, where)
        case {"type": "url", "url": str(url)}:
            return TranslatedImage(url, None, where)
        case {"type": "file"}:
            raise not_supported(f"{where}.source", "An image that is a file of the provider's")
    raise bad_request(
        f"Invalid '{where}.source': expected 'type' base64 with 'media_type' and 'data', or 'type' url with 'url'.",
        f"{where}.source",
        "invalid_value",
    )


def _result(value: Any, where: str, is_error: bool) -> str | list[dict[str, Any]]:
    """Result of a tool: a text, or a chat's parts if there are images among it."""
    start = "Error: " if is_error else ""
    if not isinstance(value, list) or not any(isinstance(b, dict) and b.get("type") == "image" for b in value):
        return start + _texts(value, where)
    parts: list[dict[str, Any]] = [{"type": "text", "text": start}] if start else []
    for i, block in enumerate(value):
        if isinstance(block, dict) and block.get("type") == "image":
            parts.append(_image(block, f"{where}[{i}]"))
        else:
            parts.append({"type": "text", "text": _texts([block], where)})
    return parts


def _without_billing(system: Any) -> Any:
    """The system prompt without the block that Claude Code writes for its provider's billing.

    It differs from conversation to conversation, so that no two prompts would begin alike.
    """
    if not isinstance(system, list):
        return system
    kept = [
        block for block in system if not (isinstance(block, dict) and str(block.get("text", "")).startswith(_BILLING))
    ]
    if len(kept) < len(system):
        ignore("system[].billing_header", "it is for the provider's own records")
    return kept


def _document(block: dict[str, Any], where: str) -> str:
    """A document of plain text, its title and context before it."""
    match block.get("source"):
        case {"type": "text", "data": str(text)}:
            pass
        case {"type": "content", "content": content}:
            text = _texts(content, f"{where}.source.content")
        case _:
            raise not_supported(f"{where}.source", "A document that is no plain text")
    heads = [head for key in ("title", "context") if isinstance(head := block.get(key), str) and head]
    return "\n".join([*heads, text])


def _texts(value: Any, where: str) -> str:
    """The text of a string, or of text blocks and documents."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad_request(f"Invalid '{where}': expected a string or text blocks.", where, "invalid_type")
    texts = []
    for i, block in enumerate(value):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "document"}:
                texts.append(_document(block, f"{where}[{i}]"))
            case _:
                raise not_supported(f"{where}[{i}]", "A block that is no text")
    return "\n".join(texts)
