"""Images for the API: from URLs to prepared images, for a model that takes some."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from server.checkpoint.images import image_token_id
from server.config import HttpConfig
from server.images.client import ImageProcess
from server.images.data_urls import is_data_url, read_data_url
from server.images.fetching import ImageFetcher
from server.images.store import ImageStore, StoredImage, TakenListener, ignore


class Images:
    """All that one server needs for images. Use from one event loop only."""

    def __init__(self, folder: Path, config: HttpConfig, taken: TakenListener = ignore) -> None:
        """taken: see ImageStore. Raises CheckpointError for a checkpoint that does not say which token an image's are."""
        self.token_id = image_token_id(folder)
        """The token that stands for a row of an image's features."""
        self.most = config.max_images
        """Images that a request may have."""
        self._max_bytes = config.max_image_bytes
        self._fetcher = ImageFetcher(config.image_hosts, config.image_timeout_s)
        self._process = ImageProcess(folder)
        self._store = ImageStore(self._process, config.max_image_pixels, taken=taken)

    async def placeholder(self) -> str:
        """Give the text that the chat template writes for an image. Raises ImagesUnavailableError."""
        return (await self._process.start()).placeholder

    async def take(self, url: str, *, low_detail: bool) -> StoredImage:
        """The prepared image of a URL; give_back() has to follow. Raises ImageRefusedError and ImagesUnavailableError."""
        if is_data_url(url):
            data = await asyncio.to_thread(read_data_url, url, self._max_bytes)
        else:
            data = await self._fetcher.fetch(url, self._max_bytes)
        return await self._store.take(data, low_detail=low_detail)

    def give_back(self, images: Iterable[StoredImage]) -> None:
        """A request needs these no longer."""
        self._store.give_back(images)

    async def close(self) -> None:
        """End the image process and remove what it has made."""
        await self._process.close()
        self._store.close()
