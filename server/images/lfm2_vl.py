"""Images of LFM2-VL, prepared as by transformers' own processor, which needs torchvision and torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from server.checkpoint.inspection import read_json

_Size = tuple[int, int]
_Pixels = npt.NDArray[np.float32]


class Lfm2VlSettings(msgspec.Struct, frozen=True):
    """The fields of an image processor's settings that are read, with transformers' defaults."""

    do_image_splitting: bool = True
    min_tiles: int = 2
    max_tiles: int = 10
    use_thumbnail: bool = True
    min_image_tokens: int = 64
    max_image_tokens: int = 256
    encoder_patch_size: int = 16
    downsample_factor: int = 2
    tile_size: int = 512
    max_pixels_tolerance: float = 2.0
    resample: int = Image.Resampling.BILINEAR
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @classmethod
    def of(cls, folder: Path) -> Lfm2VlSettings:
        """The settings of the checkpoint in a folder. Raises msgspec.ValidationError, which names a wrong field."""
        own, both = folder / "preprocessor_config.json", folder / "processor_config.json"
        found = read_json(own) if own.exists() else read_json(both).get("image_processor", {})
        return msgspec.convert({name: value for name, value in found.items() if value is not None}, cls)

    @property
    def token_size(self) -> int:
        """Pixels a side of what one token stands for."""
        return self.encoder_patch_size * self.downsample_factor

    @property
    def max_patches(self) -> int:
        """Patches that every tile is padded to."""
        tile = (self.tile_size // self.encoder_patch_size) ** 2 if self.do_image_splitting else 0
        return max(self.max_image_tokens * self.downsample_factor**2, tile)

    def whole_size(self, width: int, height: int) -> _Size:
        """Width and height of an image that is not divided, or of the thumbnail of one that is."""
        unit, pixels = self.token_size, self.token_size**2
        rounded = [max(unit, round(side / unit) * unit) for side in (width, height)]
        if math.prod(rounded) > self.max_image_tokens * pixels:
            scale = math.sqrt(width * height / (self.max_image_tokens * pixels))
            rounded = [max(unit, math.floor(side / scale / unit) * unit) for side in (width, height)]
        elif math.prod(rounded) < self.min_image_tokens * pixels:
            scale = math.sqrt(self.min_image_tokens * pixels / (width * height))
            rounded = [math.ceil(side * scale / unit) * unit for side in (width, height)]
        return rounded[0], rounded[1]

    def grid(self, width: int, height: int) -> _Size:
        """Columns and rows of the tiles that an image is divided into; (1, 1): it is not."""
        rounded = (
            max(self.encoder_patch_size, round(side / self.token_size) * self.token_size) for side in (width, height)
        )
        most = self.max_image_tokens * self.token_size**2 * self.max_pixels_tolerance
        if not self.do_image_splitting or self.min_tiles == self.max_tiles == 1 or math.prod(rounded) <= most:
            return 1, 1
        best, least = (1, 1), math.inf
        for columns, rows in self._grids():
            difference = abs(width / height - columns / rows)
            fills = width * height > 0.5 * self.tile_size**2 * columns * rows
            if difference < least or (difference == least and fills):
                best, least = (columns, rows), difference
        return best

    def _grids(self) -> list[_Size]:
        # transformers' own expression: of equal numbers of tiles the order is the set's.
        low, high = self.min_tiles, self.max_tiles
        found = {
            (w, h)
            for n in range(low, high + 1)
            for w in range(1, n + 1)
            for h in range(1, n + 1)
            if low <= w * h <= high
        }
        return sorted(found, key=math.prod)


class Lfm2VlLayout:
    """Tiles of an image from left to right and from top to bottom, each behind a token that names it; then a thumbnail."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        """Raises ValueError for settings of other types."""
        self.image_token = str(getattr(tokenizer, "image_token", "<image>"))
        self._start = str(getattr(tokenizer, "image_start_token", "<|image_start|>"))
        self._end = str(getattr(tokenizer, "image_end_token", "<|image_end|>"))
        self._thumbnail = str(getattr(tokenizer, "image_thumbnail_token", "<|img_thumbnail|>"))
        self._settings = Lfm2VlSettings.of(folder)

    def _merge_kwargs(self, **_: Any) -> dict[str, dict[str, Any]]:
        return {"images_kwargs": {}}

    def _process_images(self, images: list[Image.Image], **_: Any) -> tuple[dict[str, npt.NDArray[Any]], list[str]]:
        tiles: list[_Pixels] = []
        texts = []
        for image in images:
            own, text = self._tiles(image)
            tiles += own
            texts.append(text)
        settings = self._settings
        shapes = np.array([np.array(tile.shape[:2]) // settings.encoder_patch_size for tile in tiles], np.int64)
        counts = shapes.prod(-1)
        values = np.zeros((len(tiles), settings.max_patches, 3 * settings.encoder_patch_size**2), np.float32)
        for place, (tile, count) in enumerate(zip(tiles, counts, strict=True)):
            values[place, :count] = _patches(tile, settings.encoder_patch_size)
        mask = np.arange(settings.max_patches) < counts[:, None]
        return {"pixel_values": values, "pixel_attention_mask": mask, "spatial_shapes": shapes}, texts

    def _tiles(self, image: Image.Image) -> tuple[list[_Pixels], str]:
        settings, token = self._settings, self.image_token
        whole = settings.whole_size(*image.size)
        if math.prod(whole) > settings.max_patches * settings.encoder_patch_size**2:
            raise ValueError(f"its sides of {image.width} and {image.height} pixels differ too much")
        columns, rows = settings.grid(*image.size)
        tiles, text = [], ""
        if columns * rows > 1:
            size = settings.tile_size
            large = self._scaled(image, (columns * size, rows * size))
            for row in range(rows):
                for column in range(columns):
                    tiles.append(large[row * size : (row + 1) * size, column * size : (column + 1) * size])
                    text += f"<|img_row_{row + 1}_col_{column + 1}|>" + token * self._tokens((size, size))
            text += self._thumbnail if settings.use_thumbnail else ""
        if columns * rows == 1 or settings.use_thumbnail:
            tiles.append(self._scaled(image, whole))
            text += token * self._tokens(whole)
        return tiles, self._start + text + self._end

    def _tokens(self, size: _Size) -> int:
        settings = self._settings
        return math.prod(math.ceil(side // settings.encoder_patch_size / settings.downsample_factor) for side in size)

    def _scaled(self, image: Image.Image, size: _Size) -> _Pixels:
        """float32 [height, width, 3], normalized."""
        settings = self._settings
        pixels = np.asarray(image.resize(size, Image.Resampling(settings.resample)), np.float32)
        mean, std = (
            np.array(own, np.float32) / settings.rescale_factor for own in (settings.image_mean, settings.image_std)
        )
        scaled: _Pixels = ((pixels - mean.astype(np.float32)) / std.astype(np.float32)).astype(np.float32)
        return scaled


def _patches(tile: _Pixels, size: int) -> _Pixels:
    """float32 [patches, size * size * 3] of a tile [height, width, 3]."""
    height, width = tile.shape[0] // size, tile.shape[1] // size
    patches: _Pixels = tile.reshape(height, size, width, size, 3).transpose(0, 2, 1, 3, 4).reshape(height * width, -1)
    return patches
