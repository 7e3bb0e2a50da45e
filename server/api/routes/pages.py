"""The pages for people: one to chat, one to look at the API. They load nothing from elsewhere."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server import PACKAGE
from server.api.http.errors import ApiError

router = APIRouter(include_in_schema=False)

# Only scripts and styles of this server are allowed, and no inline ones. A model's text enters the document through
# DOMPurify alone, and loads nothing. Attached images are data: addresses.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
_MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
ASSETS = (
    "answering.js",
    "api.js",
    "app.js",
    "attachments.js",
    "base.css",
    "chat.css",
    "composer.js",
    "conversation.js",
    "docs.css",
    "docs.js",
    "dom.js",
    "edit.js",
    "exchange.js",
    "favicon.svg",
    "figures.js",
    "formulas.js",
    "markdown.js",
    "math.js",
    "menu.js",
    "merge.js",
    "models.js",
    "prose.css",
    "server.js",
    "settings.js",
    "sidebar.js",
    "store.js",
    "vendor/Temml-Local.css",
    "vendor/Temml.woff2",
    "vendor/highlight.min.js",
    "vendor/markdown-it.esm.min.mjs",
    "vendor/purify.min.js",
    "vendor/temml.min.js",
    "view.js",
)
"""Names that are served under /static, and no others."""

# How the pages name the assets, wherever a proxy has put the server; the "-" becomes their digest. Modules import each other
# by relative addresses, too, so that one page never gets files of two versions.
_PLACE = b"static/-/"


@dataclass(frozen=True)
class _File:
    """One file as it is sent: body, and the same compressed."""

    body: bytes
    packed: bytes
    media_type: str
    etag: str


def _file(name: str, body: bytes) -> _File:
    etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    return _File(body, gzip.compress(body, mtime=0), _MEDIA_TYPES[name.rpartition(".")[2]], etag)


def _read(name: str) -> bytes:
    return files(f"{PACKAGE}.api").joinpath("static", *name.split("/")).read_bytes()


@cache
def _assets() -> tuple[str, dict[str, _File]]:
    """Digest of all assets together, and each by its name."""
    found = {name: _file(name, _read(name)) for name in ASSETS}
    digest = hashlib.sha256("".join(f"{name} {file.etag}\n" for name, file in found.items()).encode())
    return digest.hexdigest()[:16], found


@cache
def _page(name: str) -> _File:
    return _file(name, _read(name).replace(_PLACE, f"static/{_assets()[0]}/".encode()))


def _answer(request: Request, file: _File, headers: dict[str, str]) -> Response:
    headers = {"X-Content-Type-Options": "nosniff", "Vary": "Accept-Encoding", "ETag": file.etag} | headers
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    body = file.body
    if "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["Content-Encoding"] = file.packed, "gzip"
    return Response(body, media_type=file.media_type, headers=headers)


def _answer_page(request: Request, name: str) -> Response:
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": _POLICY,
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
    }
    return _answer(request, _page(name), headers)


@router.get("/")
async def chat_page(request: Request) -> Response:
    """A page to talk to the model."""
    return _answer_page(request, "chat.html")


@router.get("/docs")
async def docs_page(request: Request) -> Response:
    """The OpenAPI document as a page."""
    return _answer_page(request, "docs.html")


@router.get("/static/{digest}/{name:path}")
async def asset(request: Request, digest: str, name: str) -> Response:
    """A script, a style or a drawing of the pages. Its address changes with its content, so it may be cached for ever."""
    current, known = _assets()
    if digest != current or name not in known:
        raise ApiError(404, f"There is no {request.url.path} here.", code="unknown_url")
    return _answer(request, known[name], {"Cache-Control": "public, max-age=31536000, immutable"})
