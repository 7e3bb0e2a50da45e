"""The messages of a chat request, checked one by one and brought into the form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from server.api.http.errors import bad_request, not_supported, shown
from server.api.http.ignored import ignore_others, ignore_unknown
from server.api.http.validation import wrong_type
from server.api.openai.image_parts import ImageParts
from server.text.image_marks import IMAGE, without_marks

ROLES = ("system", "developer", "user", "assistant", "tool")
UNSUPPORTED_ROLES = ("function",)
UNSUPPORTED_FIELDS = frozenset({"function_call", "refusal", "audio", "annotations", "reasoning_details"})
"""Fields that clients send back from answers they got; accepted only when empty."""
UNSUPPORTED_PARTS = frozenset({"input_audio", "file", "refusal", "video_url", "audio_url", "image", "video"})
NO_IMAGES = "it has no images"


def conversation(messages: Sequence[Any], images: ImageParts | None = None) -> list[dict[str, Any]]:
    """Messages with role, content as one string, and whatever else templates look at.

    That is name, tool_calls (arguments as objects), tool_call_id and reasoning_content. Raises ApiError that names what is
    wrong.

    images: collects the images, for each of which the content gets a mark (server.text.image_marks); None where there may be
    none.
    """
    images = images or ImageParts(NO_IMAGES)
    result: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for i, raw in enumerate(messages):
        message = _message(raw, f"messages[{i}]", images)
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool":
            # Some templates name the function whose result it is.
            message.setdefault("name", names.get(message["tool_call_id"], "unknown"))
        result.append(message)
    return result


def _message(raw: Any, where: str, images: ImageParts) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise wrong_type(where, "an object", raw)
    message: dict[str, Any] = {"role": read_role(raw, where)}
    for key, value in raw.items():
        param = f"{where}.{shown(key)}"
        match key:
            case "prefix" if value is not None and not isinstance(value, bool):
                raise wrong_type(param, "a boolean", value)
            case "role" | "prefix":  # see ChatOptions.continues
                pass
            case "content":
                if value is not None:
                    message["content"] = _content(value, param, message["role"], images)
            case "name" | "tool_call_id" | "reasoning_content" | "reasoning":
                _text_field(message, key, value, param)
            case "tool_calls":
                if value:
                    message["tool_calls"] = tool_calls(value, param)
            case _ if key in UNSUPPORTED_FIELDS:
                if value:
                    raise not_supported(param, f"'{key}'")
            case _:
                ignore_unknown(param)
    _check_fields(message, where)
    return message


def _text_field(message: dict[str, Any], key: str, value: Any, param: str) -> None:
    if value is not None and not isinstance(value, str):
        raise wrong_type(param, "a string", value)
    if value is not None:
        message["reasoning_content" if key == "reasoning" else key] = value


def _check_fields(message: dict[str, Any], where: str) -> None:
    """Fields that each role must and may have."""
    role = message["role"]
    only = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}
    for key, owner in only.items():
        if key in message and role != owner:
            param = f"{where}.{key}"
            raise bad_request(f"'{param}' belongs to messages of the role '{owner}'.", param, "invalid_value")
    # Answers whose thoughts were cut come back without content.
    complete = "tool_calls" in message or message.get("reasoning_content")
    needed = ["tool_call_id", "content"] if role == "tool" else [] if complete else ["content"]
    for key in needed:
        if key not in message:
            param = f"{where}.{key}"
            raise bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    message.setdefault("content", "")


def tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Calls that the assistant made earlier. Raises ApiError."""
    if not isinstance(value, list):
        raise wrong_type(where, "an array", value)
    calls = []
    for i, call in enumerate(value):
        param = f"{where}[{i}]"
        match call:
            case {"id": str(call_id), "function": {"name": str(name), **rest}}:
                written = rest.get("arguments")
            case _:
                written = False
        match written:
            case str() | None:
                pass
            case _:
                raise bad_request(
                    f"Invalid '{param}': expected an object with 'id', 'type' and 'function' (its 'name', and its "
                    "'arguments' as a string).",
                    param,
                    "invalid_value",
                )
        if call.get("type", "function") != "function":
            raise not_supported(f"{param}.type", "A type of call other than 'function'")
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": _arguments(written)}})
    return calls


def _arguments(written: str | None) -> Any:
    """Arguments as an object, which is what templates write; a text that is none stays one.

    Models and clients say in many ways that there are none.
    """
    if written is None or not written.strip():
        return {}
    try:
        arguments = json.loads(written)
    except (ValueError, RecursionError):
        return written
    return {} if arguments is None else arguments if isinstance(arguments, dict) else written


def read_role(raw: dict[str, Any], where: str, roles: Sequence[str] = ROLES) -> str:
    """The role of a message, one of some. Raises ApiError."""
    param = f"{where}.role"
    role = raw.get("role")
    if role is None:
        raise bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if not isinstance(role, str):
        raise wrong_type(param, "a string", role)
    if role in UNSUPPORTED_ROLES:
        raise not_supported(param, f"The role '{role}'")
    if role not in roles:
        supported = ", ".join(f"'{name}'" for name in roles)
        raise bad_request(
            f"Invalid value for '{param}': '{shown(role)}'. Supported values are: {supported}.", param, "invalid_value"
        )
    return role


def _content(value: Any, where: str, role: str, images: ImageParts) -> str:
    if isinstance(value, str):
        return without_marks(value)
    if not isinstance(value, list):
        raise wrong_type(where, "a string or an array of content parts", value)
    if not value:
        raise bad_request(f"Invalid '{where}': expected at least one content part.", where, "empty_array")
    content = ""
    for i, raw in enumerate(value):
        part = _part(raw, f"{where}[{i}]", role, images)
        # Texts that follow one another are lines.
        lines = i > 0 and part != IMAGE and not content.endswith(IMAGE)
        content += f"\n{part}" if lines else part
    return content


def _part(part: Any, where: str, role: str, images: ImageParts) -> str:
    if not isinstance(part, dict):
        raise wrong_type(where, "an object", part)
    kind = part.get("type")
    if kind == "image_url":
        images.read(part, role, where)
        return IMAGE
    if isinstance(kind, str) and kind in UNSUPPORTED_PARTS:
        raise not_supported(f"{where}.type", f"Content of type '{kind}'")
    if kind != "text":
        param = f"{where}.type"
        raise bad_request(
            f"Invalid value for '{param}': {shown(repr(kind))}. Supported values are: 'text', 'image_url'.",
            param,
            "invalid_value",
        )
    ignore_others(part, ("type", "text"), where)
    text = part.get("text")
    if not isinstance(text, str):
        raise wrong_type(f"{where}.text", "a string", text)
    return without_marks(text)
