"""Messages between the API process and the image process: msgspec structs, each behind its length on a pipe."""

from __future__ import annotations

import struct

import msgspec

LENGTH = struct.Struct("<I")
"""Bytes of the message that follows."""


class ImageJob(msgspec.Struct, tag="job", frozen=True):
    """API to image process: prepare an encoded image."""

    data: bytes
    file: str
    """Path of the file for its tensors."""
    max_pixels: int
    """Images of more are refused before they are decoded."""
    box: int | None = None
    """Larger images are scaled down to fit into a square with this many pixels a side."""


class ProcessorReady(msgspec.Struct, tag="ready", frozen=True):
    """Image process to API, once: it takes images."""

    placeholder: str
    """Text that the chat template writes for an image."""


class PreparedImage(msgspec.Struct, tag="prepared", frozen=True):
    """Image process to API: the image's tensors are in the file."""

    text: str
    """Text of the prompt for the template's image token."""
    placeholders: int
    """Tokens of that text that the image's features replace."""
    num_bytes: int


class ImageRefused(msgspec.Struct, tag="refused", frozen=True):
    """Image process to API: the image cannot be used; message is one line that goes on from "the image"."""

    message: str


class ProcessorFailed(msgspec.Struct, tag="failed", frozen=True):
    """Image process to API: it ends, because the checkpoint's files say nothing that it can work with."""

    message: str


FromImages = ProcessorReady | PreparedImage | ImageRefused | ProcessorFailed


def framed(message: msgspec.Struct) -> bytes:
    """A message as it goes over the pipe."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data
