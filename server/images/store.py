"""Prepared images on disk: found again by their bytes, kept while requests use them and as long as there is room."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from server.images.client import ImageProcess
from server.images.messages import ImageJob

CACHE_BYTES = 2**30
"""Bytes of disk for prepared images that no request uses."""
LOW_DETAIL_BOX = 512
"""Images of OpenAI's detail "low" are scaled down to fit into a square with this many pixels a side."""

TakenListener = Callable[[float | None], None]
"""Called with the seconds that preparing an image took, or None for one that had been prepared."""


def ignore(seconds: float | None) -> None:
    """A TakenListener that counts nothing."""


@dataclass
class StoredImage:
    """A prepared image."""

    key: bytes
    """Names the image's bytes and how they were prepared."""
    file: Path
    """Its tensors (safetensors)."""
    text: str
    """Its text in the prompt."""
    placeholders: int
    """Tokens of the text that its features replace."""
    num_bytes: int
    users: int = 0


class ImageStore:
    """Prepares images through an ImageProcess, each once. Use from one event loop only."""

    def __init__(
        self, process: ImageProcess, max_pixels: int, cache_bytes: int = CACHE_BYTES, taken: TakenListener = ignore
    ) -> None:
        """taken is called for every image that take() returns: see TakenListener."""
        self._process = process
        self._max_pixels = max_pixels
        self._cache_bytes = cache_bytes
        self._taken = taken
        self._folder: Path | None = None
        self._images: OrderedDict[bytes, StoredImage] = OrderedDict()
        self._preparing: dict[bytes, asyncio.Lock] = {}

    async def take(self, data: bytes, *, low_detail: bool = False) -> StoredImage:
        """The prepared image of encoded data, which give_back() has to follow for.

        Raises ImageRefusedError and ImagesUnavailableError.
        """
        box = LOW_DETAIL_BOX if low_detail else None
        key = hashlib.blake2b(data, digest_size=16, salt=str(box or "").encode()).digest()
        lock = self._preparing.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                image, seconds = self._images.get(key), None
                if image is None:
                    begun = time.monotonic()
                    image = await self._prepare(key, data, box)
                    seconds = time.monotonic() - begun
        finally:
            if not lock.locked():
                self._preparing.pop(key, None)
        self._images.move_to_end(key)
        image.users += 1
        self._taken(seconds)
        return image

    def give_back(self, images: Iterable[StoredImage]) -> None:
        """A request needs these no longer."""
        for image in images:
            image.users -= 1
        unused = sum(image.num_bytes for image in self._images.values() if not image.users)
        for image in list(self._images.values()):
            if unused <= self._cache_bytes:
                return
            if not image.users:
                unused -= image.num_bytes
                del self._images[image.key]
                image.file.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all files."""
        self._images.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    async def _prepare(self, key: bytes, data: bytes, box: int | None) -> StoredImage:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="nf4-images-"))
        file = self._folder / f"{key.hex()}.safetensors"
        try:
            found = await self._process.prepare(ImageJob(data, str(file), self._max_pixels, box))
        except BaseException:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
            raise
        image = StoredImage(key, file, found.text, found.placeholders, found.num_bytes)
        self._images[key] = image
        return image
