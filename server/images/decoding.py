"""From an encoded image to its pixels, with every limit checked before the pixels are made."""

from __future__ import annotations

import io
import struct
import warnings

from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Those that OpenAI takes; an image of several frames is refused."""
LONGEST_SIDE = 1 << 16


class ImageError(Exception):
    """An image cannot be used; the message goes on from "the image"."""


def decode(data: bytes, max_pixels: int, box: int | None = None) -> Image.Image:
    """The image in data, in RGB on white and upright; scaled down to fit into a square of box pixels, if one is given.

    Raises ImageError.
    """
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        warnings.filterwarnings("ignore", category=UserWarning)
        try:
            # Opening reads the head only, whose size is checked here; later Pillow checks whatever it makes room for.
            Image.MAX_IMAGE_PIXELS = None
            return _decoded(data, max_pixels, box)
        except UnidentifiedImageError as e:
            raise ImageError(f"is in none of the formats {', '.join(FORMATS)}") from e
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
            raise ImageError(f"has more than the {max_pixels} pixels that are taken (http.max_image_pixels)") from e
        # What Pillow's decoders raise for damage.
        except (OSError, SyntaxError, ValueError, struct.error, IndexError, KeyError, TypeError, EOFError) as e:
            raise ImageError(f"is damaged: {_line(e)}") from e


def _decoded(data: bytes, max_pixels: int, box: int | None) -> Image.Image:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        width, height = image.size
        if width * height > max_pixels or max(width, height) > LONGEST_SIDE:
            raise ImageError(
                f"has {width} x {height} pixels; at most {max_pixels} are taken, and {LONGEST_SIDE} a side"
                " (http.max_image_pixels)"
            )
        Image.MAX_IMAGE_PIXELS = max_pixels
        if getattr(image, "is_animated", False):
            raise ImageError(f"has {getattr(image, 'n_frames', 'several')} frames; only still images are taken")
        image.load()
        pixels = _opaque(ImageOps.exif_transpose(image))
        if box is not None:
            pixels.thumbnail((box, box), Image.Resampling.BICUBIC)
        return pixels


def _opaque(image: Image.Image) -> Image.Image:
    """The image in RGB, on white where it is transparent: black ink on a transparent ground would be black on black."""
    if image.mode.startswith("I;16"):  # a plain conversion would cut off at 255
        image = image.point(lambda value: value / 256).convert("L")
        image.info.pop("transparency", None)  # a grey level of 16 bits
    if not image.has_transparency_data:
        return image.convert("RGB")
    whole = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", whole.size, "white"), whole).convert("RGB")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
