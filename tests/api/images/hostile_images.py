"""Images that are broken, huge or lie of themselves, made at random from a seed."""

from __future__ import annotations

import functools
import io
import random
import struct
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image, PngImagePlugin

from tests.api.images.image_models import encoded, picture

FORMS = ("PNG", "JPEG", "WEBP", "GIF")
Chance = random.Random


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, color: int = 2, interlaced: int = 0) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(chunks) + chunk(b"IEND", b"")


def _whole(chance: Chance) -> bytearray:
    return bytearray(encoded(picture(chance.randrange(1000), 64, 48), chance.choice(FORMS)))


def _cut(chance: Chance) -> bytes:
    data = _whole(chance)
    return bytes(data[: chance.randrange(len(data) - 4)])


def _bytes_changed(chance: Chance) -> bytes:
    data = _whole(chance)
    for _ in range(chance.randrange(1, 20)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


def _head_changed(chance: Chance) -> bytes:
    data = _whole(chance)
    for _ in range(chance.randrange(1, 4)):
        data[chance.randrange(4, 40)] = chance.choice([0, 1, 127, 128, 255])
    return bytes(data)


def _spliced(chance: Chance) -> bytes:
    one, other = _whole(chance), _whole(chance)
    return bytes(one[: chance.randrange(len(one))] + other[chance.randrange(len(other)) :])


def _large_png(chance: Chance) -> bytes:
    """Few bytes that say that they are many pixels."""
    width, height = chance.choice(
        [(60_000, 60_000), (2**31 - 1, 1), (1, 2**31 - 1), (2**31 - 1, 2**31 - 1), (30_000, 40)]
    )
    rows = chunk(b"IDAT", _pressed(3_000_000))
    return png(width, height, rows, depth=chance.choice([1, 8, 16]), color=chance.choice([0, 2, 6]))


def _large_others(chance: Chance) -> bytes:
    """A screen, a frame or a canvas of 65535 x 65535."""
    form = chance.choice(["GIF", "JPEG", "WEBP"])
    data = bytearray(encoded(picture(1), form))
    if form == "GIF":
        place = chance.choice([6, data.index(b",\x00\x00\x00\x00") + 5])
        data[place : place + 4] = b"\xff\xff\xff\xff"
    elif form == "JPEG":
        place = data.index(b"\xff\xc0") + 5
        data[place : place + 4] = b"\xff\xff\xff\xff"
    else:
        canvas = b"VP8X" + struct.pack("<I", 10) + bytes(4) + b"\xff\xff\xff\xff\xff\x00"
        data = bytearray(b"RIFF" + struct.pack("<I", len(data) + 10) + b"WEBP" + canvas + data[12:])
    return bytes(data)


@functools.cache
def _pressed(size: int) -> bytes:
    """This many zeros, compressed to a thousandth of their number."""
    return zlib.compress(bytes(size), 9)


def _pressed_text(chance: Chance) -> bytes:
    """A comment or a profile of colors that is small until it is unpacked."""
    kind, head = chance.choice([(b"zTXt", b"a\0\0"), (b"iTXt", b"a\0\1\0\0\0"), (b"iCCP", b"a\0\0")])
    return png(2, 2, chunk(kind, head + _pressed(100_000_000)), chunk(b"IDAT", zlib.compress(bytes(14))))


def _pixels_that_never_end(chance: Chance) -> bytes:
    """More pixels than the image has, or fewer."""
    rows = _pressed(chance.choice([1, 100, 50_000_000]))
    return png(50, 50, chunk(b"IDAT", rows), interlaced=chance.randrange(2))


def _odd_settings(chance: Chance) -> bytes:
    """Depths, kinds of colors, filters and palettes that there are not."""
    rows = chunk(b"IDAT", zlib.compress(bytes([chance.randrange(256)]) * 30_000))
    palette = chunk(b"PLTE", bytes(chance.choice([0, 2, 3, 769])))
    return png(50, 50, palette, rows, depth=chance.choice([0, 3, 5, 32, 255]), color=chance.randrange(8))


def _metadata(chance: Chance) -> bytes:
    """EXIF of nothing sensible in front of an image."""
    buffer = io.BytesIO()
    exif = b"Exif\0\0" + chance.choice([b"II*\0", b"MM\0*", b""]) + chance.randbytes(chance.randrange(200))
    form = chance.choice(["JPEG", "PNG", "WEBP"])
    picture(chance.randrange(99)).save(buffer, form, exif=exif)
    return buffer.getvalue()


def _animated(chance: Chance) -> bytes:
    buffer = io.BytesIO()
    frames = [picture(seed) for seed in range(chance.randrange(2, 40))]
    frames[0].save(buffer, chance.choice(["GIF", "PNG", "WEBP"]), save_all=True, append_images=frames[1:])
    return buffer.getvalue()


def _another_format(chance: Chance) -> bytes:
    form = chance.choice(["BMP", "TIFF", "PPM", "ICO", "PDF", "TGA", "PCX", "EPS", None])
    if form is None:
        return chance.choice([b"", b"\0", b"<svg/>", b"%!PS\n(x) run", b"PK\3\4", chance.randbytes(3000)])
    return encoded(picture(1), form)


def _narrow(chance: Chance) -> bytes:
    """A whole image, of a shape or mode that few have."""
    size = chance.choice([(1, 1), (1, 900), (900, 1), (3, 300)])
    pixels = Image.fromarray(np.random.default_rng(chance.randrange(99)).integers(0, 256, (*size, 4), dtype=np.uint8))
    info = PngImagePlugin.PngInfo()
    info.add_text("a", "b" * chance.randrange(1000), zip=True)
    buffer = io.BytesIO()
    pixels.convert(chance.choice(["1", "L", "P", "LA", "RGBA", "I;16"])).save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


KINDS: tuple[Callable[[Chance], bytes], ...] = (
    _cut,
    _bytes_changed,
    _head_changed,
    _spliced,
    _large_png,
    _large_others,
    _pressed_text,
    _pixels_that_never_end,
    _odd_settings,
    _metadata,
    _animated,
    _another_format,
    _narrow,
)


def hostile_images(count: int, seed: int = 0) -> list[tuple[str, bytes]]:
    """This many images, each with the name of its kind."""
    chance = random.Random(seed)
    kinds = [KINDS[number % len(KINDS)] for number in range(count)]
    return [(kind.__name__.lstrip("_"), kind(chance)) for kind in kinds]
