"""Answers that are one JSON document."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response


def json_response(document: Any, status: int = 200) -> Response:
    """A document as an HTTP answer."""
    return Response(msgspec.json.encode(document), status, media_type="application/json")
