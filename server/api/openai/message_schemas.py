"""JSON schemas of conversations for the OpenAPI document; the code that reads conversations checks more."""

from __future__ import annotations

from typing import Any

_TEXT: dict[str, Any] = {"type": "string"}
_TEXT_OR_NULL: dict[str, Any] = {"type": ["string", "null"]}


def _object(required: list[str], /, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


def _some(items: Any) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


_PART = _object(["type", "text"], type={"const": "text"}, text=_TEXT)
_CONTENT = {"anyOf": [_TEXT, _some(_PART)]}
_IMAGE = _object(
    ["type", "image_url"],
    type={"const": "image_url"},
    image_url=_object(["url"], url=_TEXT, detail={"enum": ["auto", "low", "high"]}),
)
_CONTENT_WITH_IMAGES = {"anyOf": [_TEXT, _some({"anyOf": [_PART, _IMAGE]})]}
_CALL = _object(
    ["id", "type", "function"],
    id=_TEXT,
    type={"const": "function"},
    function=_object(["name"], name=_TEXT, arguments={"type": ["string", "null"], "description": "JSON"}),
)
_ASSISTANT = {
    "role": {"const": "assistant"},
    "name": _TEXT_OR_NULL,
    "reasoning_content": _TEXT_OR_NULL,
    "reasoning": _TEXT_OR_NULL,
}

MESSAGES_SCHEMA = _some(
    {
        "anyOf": [
            _object(["role", "content"], role={"enum": ["system", "developer"]}, content=_CONTENT, name=_TEXT_OR_NULL),
            _object(["role", "content"], role={"const": "user"}, content=_CONTENT_WITH_IMAGES, name=_TEXT_OR_NULL),
            _object(["role", "content"], **_ASSISTANT, content=_CONTENT),
            _object(["role", "tool_calls"], **_ASSISTANT, content={"type": "null"}, tool_calls=_some(_CALL)),
            _object(
                ["role", "reasoning_content"],
                **_ASSISTANT | {"reasoning_content": {**_TEXT, "minLength": 1}},
                content={"type": "null"},
            ),
            _object(["role", "content", "tool_call_id"], role={"const": "tool"}, content=_CONTENT, tool_call_id=_TEXT),
        ]
    }
)

_BLOCKS = [
    _PART,
    _object(["type", "thinking"], type={"const": "thinking"}, thinking=_TEXT, signature=_TEXT),
    _object(
        ["type", "id", "name", "input"], type={"const": "tool_use"}, id=_TEXT, name=_TEXT, input={"type": "object"}
    ),
]
_SOURCES = [
    _object(
        ["type", "media_type", "data"],
        type={"const": "base64"},
        media_type=_TEXT,
        data={**_TEXT, "description": "base64"},
    ),
    _object(["type", "url"], type={"const": "url"}, url=_TEXT),
]
_IMAGE_BLOCK = _object(["type", "source"], type={"const": "image"}, source={"anyOf": _SOURCES})
_RESULT = _object(
    ["type", "tool_use_id"],
    type={"const": "tool_result"},
    tool_use_id=_TEXT,
    content=_CONTENT,
    is_error={"type": "boolean"},
)

ANTHROPIC_MESSAGES = _some(
    {
        "anyOf": [
            _object(["role", "content"], role={"enum": ["user", "assistant", "system"]}, content=_CONTENT),
            _object(
                ["role", "content"], role={"const": "user"}, content=_some({"anyOf": [_PART, _IMAGE_BLOCK, _RESULT]})
            ),
            _object(["role", "content"], role={"const": "assistant"}, content=_some({"anyOf": _BLOCKS})),
        ]
    }
)
ANTHROPIC_SYSTEM = {"anyOf": [_TEXT, _some(_PART), {"type": "null"}]}
