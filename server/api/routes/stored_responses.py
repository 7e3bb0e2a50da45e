"""GET and DELETE /v1/responses/{id}: responses that are kept (http.response_store)."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.answering.response_store import ResponseStore
from server.api.answering.service import service_of
from server.api.http.errors import bad_request, not_supported
from server.api.http.replies import json_response

router = APIRouter()


@router.get("/v1/responses/{name}", include_in_schema=False)
async def stored_response(request: Request, name: str) -> Response:
    """A response that is kept."""
    if request.query_params.get("stream", "false") != "false":
        raise not_supported("stream", "The events of a response that is kept")
    key = getattr(request.state, "api_key", None)
    return json_response(_store_of(request).find(key, name, None).document)


@router.delete("/v1/responses/{name}", include_in_schema=False)
async def forget_response(request: Request, name: str) -> Response:
    """Remove a response that is kept."""
    _store_of(request).forget(getattr(request.state, "api_key", None), name)
    return json_response({"id": name, "object": "response", "deleted": True})


def _store_of(request: Request) -> ResponseStore:
    store = service_of(request).responses
    if store is None:
        raise bad_request("This server stores no responses (http.response_store).", None, "not_stored")
    return store
