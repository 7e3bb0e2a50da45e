"""The image process: `python -m server.images.worker FOLDER`. It decodes data from strangers, and may crash on it.

It reads ImageJob from standard input and answers each on standard output, until its input ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

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

if TYPE_CHECKING:
    from server.images.processor import ImageProcessor

MEMORY_BYTES = 4 * 2**30
"""Bytes that an image may take beside what the process takes without one."""


def main() -> int:
    """Exit code 0 after the end of the input; 1 when the checkpoint's image processor cannot be used."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the API process ends this one
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    # As in the API process: images are prepared without torch, which takes seconds to import, and memory.
    sys.modules["torch"] = None  # type: ignore[assignment]
    # Whatever a library prints must not come between messages.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from server.checkpoint.base import CheckpointError
    from server.images.processor import ImageProcessor

    try:
        processor = ImageProcessor(folder)
    except (CheckpointError, ImportError) as e:
        _send(output, ProcessorFailed(str(e)))
        return 1
    _limit_memory()
    _send(output, ProcessorReady(processor.placeholder))
    decoder = msgspec.msgpack.Decoder(ImageJob)
    while (data := _read(sys.stdin.buffer)) is not None:
        _send(output, _answer(processor, decoder.decode(data)))
    return 0


def _answer(processor: ImageProcessor, job: ImageJob) -> FromImages:
    from safetensors.numpy import save_file

    from server.images.decoding import ImageError, decode

    try:
        tensors, text, placeholders = processor.prepare(decode(job.data, job.max_pixels, job.box))
        save_file(tensors, job.file)
    except ImageError as e:
        return ImageRefused(str(e))
    except MemoryError:
        return ImageRefused("takes more memory than images get")
    return PreparedImage(text, placeholders, os.path.getsize(job.file))


def _limit_memory() -> None:
    """Let the process grow by MEMORY_BYTES and no further."""
    with contextlib.suppress(OSError, ValueError):  # no /proc, or a lower limit already
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _send(output: BinaryIO, message: msgspec.Struct) -> None:
    output.write(framed(message))
    output.flush()


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    return stream.read(length)


if __name__ == "__main__":
    sys.exit(main())
