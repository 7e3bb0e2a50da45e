"""The pages for people: one to chat, one to look at the API. Both are single files that load nothing from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

# The pages' own scripts and nothing else; what a model writes can only be text there.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@cache
def _page(name: str) -> bytes:
    return files("server.api").joinpath("static", name).read_bytes()


def _answer(name: str) -> Response:
    headers = {
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return Response(_page(name), media_type="text/html; charset=utf-8", headers=headers)


@router.get("/")
async def chat_page() -> Response:
    """A page to talk to the model."""
    return _answer("chat.html")


@router.get("/docs")
async def docs_page() -> Response:
    """The OpenAPI document as a page."""
    return _answer("docs.html")
