"""Image processors that transformers has for torchvision alone, for Pillow and numpy.

torchvision is no dependency: each of its versions needs one version of torch, which the image process never imports, and
the wheel on PyPI cannot be imported next to a torch for CPUs (0.28.0: "operator torchvision::nms does not exist").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import PILImageResampling, SizeDict


class MuseGlimmerImages(PilBackend):  # type: ignore[misc]
    """As MuseGlimmerImageProcessor: patches in rows, each repeated temporal_patch_size times."""

    resample = PILImageResampling.LANCZOS
    do_resize = do_rescale = do_normalize = do_convert_rgb = True
    rescale_factor = 1 / 255
    image_mean = image_std = (0.5, 0.5, 0.5)
    patch_size, temporal_patch_size, merge_size, max_image_tokens = 14, 2, 2, 4096

    def _validate_preprocess_kwargs(self, **options: Any) -> None:
        super()._validate_preprocess_kwargs(**options | {"do_resize": False})  # there is no size

    def _preprocess(self, images: list[npt.NDArray[Any]], return_tensors: Any, **options: Any) -> BatchFeature:
        size, patches, grids = self.patch_size, [], []
        for image in images:
            _, height, width = image.shape
            grid = token_grid(height, width, size * self.merge_size, self.max_image_tokens)
            rows, columns = (tokens * self.merge_size for tokens in grid)
            found = self.resize(image, SizeDict(height=rows * size, width=columns * size), options["resample"])
            found = self.normalize(self.rescale(found, self.rescale_factor), self.image_mean, self.image_std)
            found = found.reshape(3, rows, size, columns, size).transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1)
            patches.append(np.tile(found, self.temporal_patch_size))
            grids.append([1, rows, columns])
        data = {"pixel_values": np.concatenate(patches), "image_grid_thw": np.array(grids)}
        return BatchFeature(data=data, tensor_type=return_tensors)


def token_grid(height: int, width: int, size: int, most: int) -> tuple[int, int]:
    """The (rows, columns) of tokens of size x size pixels nearest to an image's shape, at most `most` in all."""
    rows, columns = height / size, width / size
    if rows * columns > most:
        rows, columns = math.sqrt(most * height / width), math.sqrt(most * height / width) * width / height
    # As transformers has it, whose set decides which of equally near ones is taken.
    near = set(itertools.product((math.floor(rows), math.ceil(rows)), (math.floor(columns), math.ceil(columns))))
    grids = [grid for grid in near if min(grid) >= 1 and grid[0] * grid[1] <= most]
    grids = grids or [(max(1, round(rows)), max(1, round(columns)))]
    return min(grids, key=lambda grid: abs(grid[0] / grid[1] - height / width))


def _gemma4_unified(folder: Path) -> Any:
    """As Gemma4UnifiedImageProcessor: Gemma 4's, whose patches are as large as a token's and not merged in a tower."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    found = Gemma4ImageProcessorPil.from_pretrained(folder, local_files_only=True)
    found.patch_size, found.pooling_kernel_size = found.patch_size * found.pooling_kernel_size, 1
    return found


def _muse(folder: Path) -> Any:
    return MuseGlimmerImages.from_pretrained(folder, local_files_only=True)


PIL_PROCESSORS: dict[str, Callable[[Path], Any]] = {
    "gemma4_unified": _gemma4_unified,
    "muse_glimmer": _muse,
    "muse_spark": _muse,
}
"""Loaders of the image processor of a checkpoint's folder, by model type."""
