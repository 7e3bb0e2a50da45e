"""A conversation's images: fetched, prepared, and put into the places of its prompt."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from server.api.answering.service import Service
from server.api.http.errors import ApiError, bad_request, unavailable
from server.api.openai.image_parts import ImageParts, ImageSource
from server.images.client import ImageRefusedError, ImagesUnavailableError
from server.images.store import StoredImage
from server.types import ImageInput

logger = logging.getLogger(__name__)


@dataclass
class TakenImages:
    """The prepared images of one request, which hold their files until they are given back."""

    placeholder: str = ""
    """Text that the chat template writes for an image."""
    token_id: int = -1
    """The token that stands for a row of an image's features."""
    images: list[StoredImage] = field(default_factory=list)

    def placed(self, ids: Sequence[int]) -> list[ImageInput]:
        """The images, each with its place in a prompt of these tokens.

        Raises ApiError where there are more or fewer places.
        """
        places = [place for place, token in enumerate(ids) if token == self.token_id] if self.images else []
        if len(places) != sum(image.placeholders for image in self.images):
            raise bad_request(
                "The model's tokenizer does not keep the images' placeholders apart from the text.",
                "messages",
                "invalid_prompt",
            )
        found, first = [], 0
        for image in self.images:
            own = places[first : first + image.placeholders]
            first += image.placeholders
            found.append(ImageInput(image.key, own[0], own[-1] + 1, str(image.file)))
        return found


def image_parts(service: Service) -> ImageParts:
    """An object that collects the images of a request's messages."""
    images = service.images
    return ImageParts(images) if isinstance(images, str) else ImageParts(None, images.most)


async def take_images(service: Service, sources: Sequence[ImageSource]) -> TakenImages:
    """The prepared images of these sources; call give_back() afterwards. Raises ApiError that names the image."""
    taken = TakenImages()
    if not sources:
        return taken
    images = service.images
    assert not isinstance(images, str), "image_parts() refuses them"
    try:
        taken.placeholder, taken.token_id = await images.placeholder(), images.token_id
        for source in sources:
            with _named(source):
                taken.images.append(await images.take(source.url, low_detail=source.low_detail))
    except BaseException as e:
        give_back(service, taken)
        if isinstance(e, ImagesUnavailableError):
            logger.error("images cannot be prepared: %s", e)
            raise unavailable(f"Images cannot be prepared now: {e}.", "images_unavailable") from e
        raise
    return taken


def give_back(service: Service, taken: TakenImages) -> None:
    """Release the images when the request has ended."""
    images, taken.images = taken.images, []
    if images and not isinstance(service.images, str):
        service.images.give_back(images)


@contextmanager
def _named(source: ImageSource) -> Iterator[None]:
    """An error that says what is wrong with an image, and names the image's place."""
    try:
        yield
    except ImageRefusedError as e:
        raise _refused(source, e) from e


def _refused(source: ImageSource, error: ImageRefusedError) -> ApiError:
    return bad_request(f"Invalid '{source.param}': the image {error}.", source.param, "invalid_image")
