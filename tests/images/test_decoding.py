"""Images from strangers: the limits, the formats, and what is damaged."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from server.images.decoding import ImageError, decode
from tests.api.images.hostile_images import chunk, hostile_images, png
from tests.api.images.image_models import encoded, picture

MOST = 10_000


@pytest.mark.parametrize("form", ["PNG", "WEBP", "GIF", "JPEG"])
def test_formats(form: str) -> None:
    image = decode(encoded(picture(1), form), MOST)
    assert (image.mode, image.size) == ("RGB", (40, 30))
    away = np.abs(np.asarray(image, np.int64) - np.asarray(picture(1), np.int64)).mean()
    assert away < 20


def test_other_modes_become_rgb() -> None:
    gray = picture(1).convert("L")
    for mode in ("L", "LA", "P", "RGBA", "1"):
        assert decode(encoded(gray.convert(mode)), MOST).mode == "RGB"
    assert decode(encoded(picture(1).convert("CMYK"), "JPEG"), MOST).mode == "RGB"
    deep = Image.fromarray(np.asarray(gray, np.uint16) * 257)
    assert np.abs(np.asarray(decode(encoded(deep), MOST).convert("L"), int) - np.asarray(gray, int)).max() <= 1


def test_what_is_transparent_is_white() -> None:
    """As its author saw it: in editors transparent pixels are black for the most part, and so is what is drawn on them."""
    ink = Image.new("RGBA", (8, 4), (0, 0, 0, 0))
    ink.paste((0, 0, 0, 255), (0, 0, 4, 4))
    ink.paste((0, 0, 0, 128), (4, 0, 6, 4))
    for form in ("PNG", "WEBP"):
        pixels = np.asarray(decode(encoded(ink, form), MOST), int)
        assert np.abs(pixels - np.repeat([0, 127, 255], [4, 2, 2])[:, None]).max() <= 1
    gray = decode(encoded(ink.convert("LA")), MOST)
    assert gray.getpixel((0, 0)) == (0, 0, 0)
    assert gray.getpixel((7, 0)) == (255, 255, 255)
    for mode, key in (("L", 0), ("1", 0), ("P", 0), ("RGB", (0, 0, 0))):
        plain = Image.new("L", (2, 1), 255)
        plain.putpixel((0, 0), 0)
        buffer = io.BytesIO()
        plain.convert(mode).save(buffer, "PNG", transparency=key)
        assert decode(buffer.getvalue(), MOST).getpixel((0, 0)) == (255, 255, 255), mode
    deep = chunk(b"tRNS", b"\xff\xff"), chunk(b"IDAT", zlib.compress(b"\0" + b"\xff\xff" * 3))
    assert decode(png(3, 1, *deep, depth=16, color=0), MOST).getpixel((0, 0)) == (255, 255, 255)


def test_a_turned_photo_is_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    buffer = io.BytesIO()
    picture(1).save(buffer, "JPEG", exif=exif)
    seen = ImageOps.exif_transpose(Image.open(buffer)).convert("RGB")
    assert np.array_equal(decode(buffer.getvalue(), MOST), seen)
    assert seen.size == (30, 40)


def test_low_detail_is_smaller_and_never_larger() -> None:
    assert decode(encoded(picture(1, 80, 40)), MOST, 20).size == (20, 10)
    assert decode(encoded(picture(1, 8, 4)), MOST, 20).size == (8, 4)


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    bomb = png(60_000, 60_000, chunk(b"IDAT", zlib.compress(bytes(60_001 * 100))))
    with pytest.raises(ImageError, match="60000 x 60000 pixels; at most 10000"):
        decode(bomb, MOST)
    with pytest.raises(ImageError, match="65536 a side"):
        decode(png(70_000, 1), 1 << 30)


def test_a_screen_that_is_small_with_a_frame_that_is_not() -> None:
    image = bytearray(encoded(picture(1), "GIF"))
    place = image.index(b",\x00\x00\x00\x00")
    image[place + 5 : place + 9] = struct.pack("<HH", 60_000, 60_000)
    with pytest.raises(ImageError):
        decode(bytes(image), MOST)


def test_an_animation_is_refused() -> None:
    for form in ("GIF", "WEBP", "PNG"):
        buffer = io.BytesIO()
        picture(1).save(buffer, form, save_all=True, append_images=[picture(2), picture(3)])
        with pytest.raises(ImageError, match="3 frames"):
            decode(buffer.getvalue(), MOST)


def test_formats_that_are_not_taken() -> None:
    for form in ("BMP", "TIFF", "PPM", "ICO", "PDF"):
        with pytest.raises(ImageError, match="formats PNG, JPEG, WEBP, GIF"):
            decode(encoded(picture(1), form), MOST)
    for data in (b"", b"\x00", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7", b"GIF89a"):
        with pytest.raises(ImageError):
            decode(data, MOST)


def test_two_hundred_that_are_hostile() -> None:
    """Each is an image, or an ImageError in one line: nothing else is raised."""
    said: list[str] = []
    for _, data in hostile_images(200):
        try:
            assert decode(data, 1_000_000).size[0] > 0
        except ImageError as error:
            said.append(str(error))
    assert 100 < len(said) < 180
    assert not any("\n" in message for message in said)
