"""Images that are contained in their URLs."""

from __future__ import annotations

import base64
import binascii
from urllib.parse import unquote_to_bytes

from server.images.client import ImageRefusedError


def is_data_url(url: str) -> bool:
    """Whether the URL holds the image itself."""
    return url[:5].lower() == "data:"


def read_data_url(url: str, max_bytes: int) -> bytes:
    """The bytes of a data: URL. Raises ImageRefusedError."""
    head, comma, written = url.partition(",")
    if not comma:
        raise ImageRefusedError("has a data: URL without data")
    if not head[5:].strip().lower().startswith("image/"):
        raise ImageRefusedError("has a data: URL of another type than image/...")
    if len(written) > 3 * max_bytes:  # every byte may be written as %xx
        raise too_large(max_bytes)
    if head.rstrip().lower().endswith(";base64"):
        try:
            data = base64.b64decode("".join(written.split()), validate=True)
        except (binascii.Error, ValueError) as e:
            raise ImageRefusedError(f"has a data: URL that is no base64 ({e})") from e
    else:
        data = unquote_to_bytes(written)
    if not data:
        raise ImageRefusedError("has no data")
    if len(data) > max_bytes:
        raise too_large(max_bytes)
    return data


def too_large(max_bytes: int) -> ImageRefusedError:
    """The refusal of an image with more bytes than are allowed."""
    return ImageRefusedError(f"is larger than the {max_bytes} bytes that are taken (http.max_image_bytes)")
