"""The images of a conversation, as its messages name them, and how many there may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.api.http.errors import bad_request, shown
from server.api.http.ignored import ignore_others
from server.api.http.validation import wrong_type

DETAILS = ("auto", "low", "high")


@dataclass(frozen=True)
class ImageSource:
    """Source of an image."""

    url: str
    """A data: URL, or where to fetch it."""
    low_detail: bool
    """Whether a smaller image will do (OpenAI's detail "low")."""
    param: str


class TranslatedImage(dict[str, Any]):
    """A part of the type image_url that was made of another API's part; errors are about that one."""

    def __init__(self, url: Any, detail: Any, where: str) -> None:
        super().__init__(type="image_url", image_url={"url": url, **({} if detail is None else {"detail": detail})})
        self.where = where


class ImageParts:
    """Collects the images of one request's messages."""

    def __init__(self, refusal: str | None = None, most: int = 0) -> None:
        """refusal: why there may be none, in words. most: how many there may be (http.max_images)."""
        self._refusal = refusal
        self._most = most
        self.found: list[ImageSource] = []

    def read(self, part: dict[str, Any], role: str, where: str) -> None:
        """Take a part of the type image_url. Raises ApiError."""
        param = f"{where}.image_url"
        if isinstance(part, TranslatedImage):
            where = param = part.where
        if self._refusal is not None:
            kind = where if isinstance(part, TranslatedImage) else f"{where}.type"
            raise bad_request(
                f"Images are not supported by this server (in '{kind}'): {self._refusal}.",
                kind,
                "unsupported_parameter",
            )
        if role not in ("user", "tool"):
            raise bad_request(
                f"Invalid '{where}': images belong to messages of the role 'user'.", where, "invalid_value"
            )
        ignore_others(part, ("type", "image_url"), where)
        given = part.get("image_url")
        fields = {"url": given} if isinstance(given, str) else given
        if not isinstance(fields, dict) or not isinstance(fields.get("url"), str):
            raise wrong_type(param, "an object with a string 'url'", given)
        ignore_others(fields, ("url", "detail"), param)
        detail = fields.get("detail")
        if detail is not None and detail not in DETAILS:
            supported = ", ".join(f"'{name}'" for name in DETAILS)
            raise bad_request(
                f"Invalid value for '{param}.detail': {shown(repr(detail))}. Supported values are: {supported}.",
                f"{param}.detail",
                "invalid_value",
            )
        if len(self.found) == self._most:
            raise bad_request(
                f"The request has more than the {self._most} images that are taken at a time (http.max_images).",
                where,
                "too_many_images",
            )
        self.found.append(ImageSource(fields["url"], detail == "low", param))
