"""From a request's body to its validated model, and from pydantic's findings to messages in OpenAI's words."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect, Request

from server.api.http.errors import ApiError, bad_request, shown
from server.api.http.ignored import ignore_unknown

M = TypeVar("M", bound=BaseModel)

_TYPE_NAMES = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}

_JSON_TYPES = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
}

_BOUNDS = {
    "greater_than_equal": (">=", "ge"),
    "greater_than": (">", "gt"),
    "less_than_equal": ("<=", "le"),
    "less_than": ("<", "lt"),
}


async def read_json(request: Request, max_bytes: int) -> tuple[dict[str, Any], int]:
    """The JSON object in a request's body, and the body's size in bytes.

    Stops reading at max_bytes. Raises ApiError (400, 413, 415).
    """
    content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(
            415,
            f"Expected Content-Type: application/json, got {shown(content_type) or 'none'}.",
            code="unsupported_media_type",
        )
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415,
            f"Content-Encoding {shown(encoding)} is not understood; send the body as it is.",
            code="unsupported_content_encoding",
            headers={"Accept-Encoding": "identity"},
        )
    body = await _read_body(request, max_bytes)
    try:
        document = from_json(body.removeprefix(codecs.BOM_UTF8))
    except ValueError as e:
        raise bad_request(f"The request body is not valid JSON: {e}.", None, "invalid_json") from e
    if not isinstance(document, dict):
        raise bad_request(f"The request body must be a JSON object, not {json_type(document)}.", None, "invalid_type")
    return document, len(body)


async def _read_body(request: Request, max_bytes: int) -> bytes:
    error = ApiError(413, f"The request body is larger than {max_bytes} bytes.", code="request_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise error
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise error
            chunks.append(chunk)
    except ClientDisconnect as e:
        raise ApiError(499, "The client closed the connection.", code="client_disconnected") from e
    return b"".join(chunks)


def validate(model: type[M], document: Mapping[str, Any], unsupported: Mapping[str, Sequence[Any]]) -> M:
    """The document as a model. Raises ApiError.

    unsupported: options that are known but not offered, each with the values that ask for nothing (null, an empty list and
    an empty string always do). Those values are dropped; others get a 400 that names the option. Unknown options, in objects
    within the document, too, are dropped and noted, or get a 400 where the configuration says so.
    """
    known = model.model_fields
    accepted = {}
    for name, value in document.items():
        if name in known:
            accepted[name] = value
        elif name not in unsupported:
            ignore_unknown(shown(name))
        elif not _asks_nothing(value, unsupported[name]):
            raise bad_request(
                f"'{name}' is not supported by this server{_allowed(unsupported[name])}.",
                name,
                "unsupported_parameter",
            )
    try:
        return model.model_validate(accepted, strict=True)
    except ValidationError as e:
        errors = e.errors(include_url=False)
        others = [found for found in errors if found["type"] != "extra_forbidden"]
        if others:
            raise _from_pydantic(others[0]) from e
    for found in errors:
        ignore_unknown(path_of(found["loc"]))
    kept = _without(accepted, [found["loc"] for found in errors])
    return model.model_validate(kept, strict=True)


def _without(document: Any, locations: Sequence[tuple[str | int, ...]]) -> Any:
    """A copy of a document that lacks what is at some locations."""
    kept: Any = dict(document) if isinstance(document, dict) else list(document)
    inner: dict[str | int, list[tuple[str | int, ...]]] = {}
    for first, *rest in locations:
        if rest:
            inner.setdefault(first, []).append(tuple(rest))
        else:
            del kept[first]
    for key, within in inner.items():
        kept[key] = _without(kept[key], within)
    return kept


def given(model: type[BaseModel], document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model that a validated document sets, as they came; null at the top says nothing."""
    return {name: document[name] for name in model.model_fields if document.get(name) is not None}


def _asks_nothing(value: Any, neutral: Sequence[Any]) -> bool:
    """Whether a value is a neutral one; 1.0 is 1, but true is not."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in (None, [], "", *neutral)
    )


def _allowed(neutral: Sequence[Any]) -> str:
    if not neutral:
        return ""
    return f"; leave it out or set it to {' or '.join(_literal(value) for value in neutral)}"


def _literal(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, repr(value)) if isinstance(value, bool) else repr(value)


def path_of(location: Sequence[str | int]) -> str:
    """`messages[0].content` for ("messages", 0, "content")."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":
            path += f".{shown(part)}" if path else shown(part)
    return path


def json_type(value: Any) -> str:
    """A value's JSON type with its article."""
    return _JSON_TYPES.get(type(value), "an object")


def wrong_type(param: str, expected: str, value: Any) -> ApiError:
    """400: an option's value is of another type than is expected; expected has its article."""
    return bad_request(
        f"Invalid type for '{param}': expected {expected}, but got {json_type(value)} instead.", param, "invalid_type"
    )


def _from_pydantic(found: ErrorDetails) -> ApiError:
    param = path_of(found["loc"])
    kind, value, context = found["type"], found["input"], found.get("ctx", {})
    if kind in _TYPE_NAMES:
        return wrong_type(param, _TYPE_NAMES[kind], value)
    match kind:
        case "missing":
            return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
        case "extra_forbidden":
            return bad_request(f"Unknown parameter: '{param}'.", param, "unknown_parameter")
        case "greater_than_equal" | "greater_than" | "less_than_equal" | "less_than":
            sign, name = _BOUNDS[kind]
            message = f"Invalid '{param}': expected a value {sign} {context[name]}, but got {_quoted(value)} instead."
            return bad_request(message, param, "value_out_of_range")
        case "literal_error":
            return bad_request(
                f"Invalid value for '{param}': {_quoted(value)}. Supported values are: {context['expected']}.",
                param,
                "invalid_value",
            )
        case "too_short":
            return bad_request(
                f"Invalid '{param}': expected an array with at least {context['min_length']} element(s), "
                f"but got {context['actual_length']}.",
                param,
                "empty_array" if not value else "array_below_min_length",
            )
        case "too_long":
            return bad_request(
                f"Invalid '{param}': expected at most {context['max_length']} element(s).",
                param,
                "array_above_max_length",
            )
    message = found["msg"].removeprefix("Value error, ")
    return bad_request(f"Invalid '{param}': {message[:1].lower()}{message[1:]}.", param, "invalid_value")


def _quoted(value: Any) -> str:
    return f"'{shown(value)}'" if isinstance(value, str) else shown(str(value))
