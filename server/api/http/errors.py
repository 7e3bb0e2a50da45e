"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
UNAVAILABLE = "service_unavailable_error"
OVERLOADED = "rate_limit_error"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's names for errors; theirs has neither param nor code, so the message names the field."""


class ApiError(Exception):
    """Ends a request with this answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self, *, anthropic: bool = False) -> bytes:
        """The JSON document, in OpenAI's shape or in Anthropic's."""
        if anthropic:
            kind = ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": self.message}})
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self, *, anthropic: bool = False) -> Response:
        """The HTTP answer."""
        return Response(self.body(anthropic=anthropic), self.status, self.headers, media_type="application/json")


def bad_request(message: str, param: str | None, code: str | None) -> ApiError:
    """400: the client's request cannot be served as it is."""
    return ApiError(400, message, param=param, code=code)


def not_supported(param: str, what: str) -> ApiError:
    """400: the request asks for something that no option of this server gives."""
    return bad_request(f"{what} is not supported by this server (in '{param}').", param, "unsupported_parameter")


def model_not_found(name: str) -> ApiError:
    """404: no model of this name is served."""
    return ApiError(
        404,
        f"The model {shown(name)!r} does not exist; GET /v1/models lists what is served.",
        param="model",
        code="model_not_found",
    )


def queue_full(retry_after_s: int) -> ApiError:
    """429: as many requests as the server holds are under way."""
    return ApiError(
        429,
        f"The server is at its limit of concurrent requests; try again in {retry_after_s} s.",
        type=OVERLOADED,
        code="queue_full",
        headers={"Retry-After": str(retry_after_s)},
    )


def unavailable(message: str, code: str, retry_after_s: int | None = 1) -> ApiError:
    """503: the server runs, but cannot generate now."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, type=UNAVAILABLE, code=code, headers=headers)


def engine_failed(message: str) -> ApiError:
    """500: the engine could not finish a request it had accepted."""
    return ApiError(500, message, type=SERVER_ERROR, code="engine_error")


def internal_error(request_id: str) -> ApiError:
    """500: a fault of the server; details are in its log only."""
    return ApiError(
        500,
        f"The server failed to answer this request; its log has the reason under request id {request_id}.",
        type=SERVER_ERROR,
        code="internal_error",
    )


def shown(value: str) -> str:
    """A client's string, short enough for a message."""
    return value if len(value) <= 100 else value[:97] + "..."


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """An error about the chat that a request was translated into, with the request's own name for its option.

    In the message the name changes only where it stands in quotes for the first time, as the error's own words have it:
    what follows may quote the client.
    """
    if error.param is not None:
        param = own_name(error.param, names)
        error.message = error.message.replace(f"'{error.param}'", f"'{param}'", 1)
        error.param = param
    return error


def own_name(param: str, names: Mapping[str, str]) -> str:
    """The request's own name for an option of the chat or text that it was translated into; [] stands for any index."""
    for chat, own in names.items():
        found = re.match(re.escape(chat).replace(r"\[\]", r"(\[\d+\])") + r"(?=[.\[]|$)", param)
        if found:
            return own.replace("[]", "".join(found.groups())) + param[found.end() :]
    return param


async def answer_api_error(request: Request, error: Exception) -> Response:
    """Exception handler for ApiError."""
    assert isinstance(error, ApiError)
    request.state.rejection = error.code or error.type
    return error.response(anthropic=request.url.path.startswith("/v1/messages"))


def _allowed_methods(request: Request) -> list[str]:
    """Methods that any of the routes takes on the request's path."""
    routes: list[BaseRoute] = request.app.routes

    def is_allowed(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in routes)

    allowed = {method for method in ("GET", "POST", "PUT", "PATCH", "DELETE") if is_allowed(method)}
    return sorted(allowed | ({"HEAD"} if "GET" in allowed else set()))


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler for what the routing raises: 404 and 405."""
    assert isinstance(error, HTTPException)
    method, path = request.method, shown(request.url.path)
    match error.status_code:
        case 404:
            message = f"Unknown request URL: {method} {path}."
            code: str | None = "unknown_url"
        case 405:
            allowed = ", ".join(_allowed_methods(request))
            error.headers = {**(error.headers or {}), "Allow": allowed}
            message, code = f"{method} is not allowed for {path}; allowed: {allowed}.", "method_not_allowed"
        case _:
            message, code = str(error.detail), None
    api_error = ApiError(error.status_code, message, code=code, headers=error.headers)
    return await answer_api_error(request, api_error)
