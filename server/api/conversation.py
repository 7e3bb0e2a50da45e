"""The messages of a chat request, checked one by one and brought into the form that chat templates take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.api.errors import ApiError, bad_request, shown
from server.api.validation import json_type

ROLES = ("system", "developer", "user", "assistant")
UNSUPPORTED_ROLES = ("tool", "function")
UNSUPPORTED_FIELDS = frozenset(
    {"tool_calls", "tool_call_id", "function_call", "refusal", "audio", "annotations", "reasoning_content", "reasoning"}
)
"""Fields that clients send back from answers they got; accepted only when empty."""
UNSUPPORTED_PARTS = frozenset(
    {"image_url", "input_audio", "file", "refusal", "video_url", "audio_url", "image", "video"}
)

MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "additionalProperties": False,
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "additionalProperties": False,
                            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        },
                    },
                ]
            },
            "name": {"type": ["string", "null"]},
        },
    },
}
"""For the OpenAPI document; what is checked below."""


def conversation(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages with role, content as one string, and name where given. Raises ApiError that names what is wrong."""
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise _wrong_type(where, "an object", raw)
    message: dict[str, Any] = {"role": _role(raw, where)}
    for key, value in raw.items():
        match key:
            case "role":
                pass
            case "content":
                if value is not None:
                    message["content"] = _content(value, f"{where}.content")
            case "name":
                if value is not None and not isinstance(value, str):
                    raise _wrong_type(f"{where}.name", "a string", value)
                if value is not None:
                    message["name"] = value
            case _ if key in UNSUPPORTED_FIELDS:
                if value:
                    raise _unsupported(f"{where}.{key}", f"'{key}'")
            case _:
                param = f"{where}.{shown(key)}"
                raise bad_request(f"Unknown parameter: '{param}'.", param, "unknown_parameter")
    if "content" not in message:
        param = f"{where}.content"
        raise bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    return message


def _role(raw: dict[str, Any], where: str) -> str:
    param = f"{where}.role"
    role = raw.get("role")
    if role is None:
        raise bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if not isinstance(role, str):
        raise _wrong_type(param, "a string", role)
    if role in UNSUPPORTED_ROLES:
        raise _unsupported(param, f"The role '{role}'")
    if role not in ROLES:
        supported = ", ".join(f"'{name}'" for name in ROLES)
        raise bad_request(
            f"Invalid value for '{param}': '{shown(role)}'. Supported values are: {supported}.", param, "invalid_value"
        )
    return role


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong_type(where, "a string or an array of content parts", value)
    if not value:
        raise bad_request(f"Invalid '{where}': expected at least one content part.", where, "empty_array")
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(value))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise _wrong_type(where, "an object", part)
    kind = part.get("type")
    if isinstance(kind, str) and kind in UNSUPPORTED_PARTS:
        raise _unsupported(f"{where}.type", f"Content of type '{kind}'")
    if kind != "text":
        param = f"{where}.type"
        raise bad_request(
            f"Invalid value for '{param}': {shown(repr(kind))}. Supported values are: 'text'.", param, "invalid_value"
        )
    for key in part:
        if key not in ("type", "text"):
            param = f"{where}.{shown(key)}"
            raise bad_request(f"Unknown parameter: '{param}'.", param, "unknown_parameter")
    text = part.get("text")
    if not isinstance(text, str):
        raise _wrong_type(f"{where}.text", "a string", text)
    return text


def _wrong_type(param: str, expected: str, value: Any) -> ApiError:
    return bad_request(
        f"Invalid type for '{param}': expected {expected}, but got {json_type(value)} instead.", param, "invalid_type"
    )


def _unsupported(param: str, what: str) -> ApiError:
    return bad_request(f"{what} is not supported by this server (in '{param}').", param, "unsupported_parameter")
