"""The image process as the API process sees it: asked for one image at a time, killed and restarted when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from pathlib import Path

import msgspec

from server import PACKAGE
from server.images.messages import (
    LENGTH,
    FromImages,
    ImageJob,
    ImageRefused,
    PreparedImage,
    ProcessorFailed,
    ProcessorReady,
    framed,
)

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
IMAGE_TIMEOUT_S = 30.0
"""An image of 33 megapixels takes a second or two."""
_MOST_BYTES = 1 << 24
_ENVIRONMENT = {
    # Each of numpy's threads would reserve memory, which is limited for the process.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


class ImageRefusedError(Exception):
    """The image cannot be used; the message goes on from "the image"."""


class ImagesUnavailableError(Exception):
    """No image can be prepared; the message is one line."""


class ImageProcess:
    """One process for a checkpoint's images. Use from one event loop only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._child: asyncio.subprocess.Process | None = None
        self._ready: ProcessorReady | None = None
        self._turn = asyncio.Lock()
        self._decoder = msgspec.msgpack.Decoder(FromImages)
        self.starts = 0

    async def start(self) -> ProcessorReady:
        """Start the process unless it runs, and give what it says about the checkpoint. Raises ImagesUnavailableError."""
        async with self._turn:
            return await self._started()

    async def prepare(self, job: ImageJob) -> PreparedImage:
        """Prepare one image. Raises ImageRefusedError for one that cannot be, and ImagesUnavailableError."""
        async with self._turn:
            await self._started()
            try:
                answer = await asyncio.wait_for(self._ask(job), IMAGE_TIMEOUT_S)
            except TimeoutError:
                await self._kill()
                raise ImageRefusedError(f"takes longer than the {IMAGE_TIMEOUT_S:.0f} s that an image gets") from None
            except (OSError, EOFError, msgspec.DecodeError) as e:
                await self._kill()
                logger.error("the image process ended over an image of %d bytes: %s", len(job.data), e)
                raise ImageRefusedError("cannot be decoded: the process that tried has ended") from e
            except BaseException:
                await self._kill()  # an answer that nobody waits for would be taken for the next one's
                raise
        if isinstance(answer, PreparedImage):
            return answer
        raise ImageRefusedError(answer.message if isinstance(answer, ImageRefused) else "got no answer")

    async def close(self) -> None:
        """End the process."""
        await self._kill()

    async def _started(self) -> ProcessorReady:
        if self._ready is not None and self._child is not None and self._child.returncode is None:
            return self._ready
        await self._kill()
        self.starts += 1
        try:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", f"{PACKAGE}.images.worker", str(self._folder)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # Only the API process acts on a terminal's Ctrl-C.
                start_new_session=True,
                env={**os.environ, **_ENVIRONMENT},
            )
            answer = await asyncio.wait_for(self._receive(), START_TIMEOUT_S)
        except (OSError, EOFError, TimeoutError, msgspec.DecodeError) as e:
            await self._kill()
            raise ImagesUnavailableError(f"the image process does not start: {e or type(e).__name__}") from e
        except BaseException:
            await self._kill()
            raise
        if not isinstance(answer, ProcessorReady):
            await self._kill()
            raise ImagesUnavailableError(answer.message if isinstance(answer, ProcessorFailed) else "it is confused")
        self._ready = answer
        return answer

    async def _ask(self, job: ImageJob) -> FromImages:
        assert self._child is not None
        assert self._child.stdin is not None
        self._child.stdin.write(framed(job))
        await self._child.stdin.drain()
        return await self._receive()

    async def _receive(self) -> FromImages:
        assert self._child is not None
        assert self._child.stdout is not None
        (length,) = LENGTH.unpack(await self._child.stdout.readexactly(LENGTH.size))
        if length > _MOST_BYTES:
            raise EOFError("its answer is no answer")
        message: FromImages = self._decoder.decode(await self._child.stdout.readexactly(length))
        return message

    async def _kill(self) -> None:
        child, self._child, self._ready = self._child, None, None
        if child is None:
            return
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        await child.wait()
