"""transformers' own image processors that need torchvision: python -m tests.images.torchvision_oracle FOLDERS.

A folder has preprocessor_config.json and images, *.png, for each of which a file *.npz is written. The processors scale and
normalize images by two functions of torchvision. This process has others in their place, which torch computes as torchvision
does.
"""

from __future__ import annotations

import enum
import importlib
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

TOKENS = {
    "image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
}  # fmt: skip
_MODULES = {
    "Lfm2VlImageProcessor": "lfm2_vl",
    "Gemma4UnifiedImageProcessor": "gemma4_unified",
    "MuseGlimmerImageProcessor": "muse_glimmer",
}
_COUNTING = ("_get_image_num_tokens", "_build_image_tokens", "_compute_tokens_per_tile", "_compute_tokens_for_image")


class InterpolationMode(enum.Enum):
    NEAREST, NEAREST_EXACT, BILINEAR, BICUBIC = "nearest", "nearest-exact", "bilinear", "bicubic"
    BOX, HAMMING, LANCZOS = "box", "hamming", "lanczos"


def resize(
    image: torch.Tensor, size: tuple[int, int], interpolation: InterpolationMode, antialias: bool
) -> torch.Tensor:
    batch = image if image.dim() == 4 else image[None]
    # torchvision takes Pillow's numbers, too.
    mode = interpolation if isinstance(interpolation, InterpolationMode) else InterpolationMode.BICUBIC
    scaled = torch.nn.functional.interpolate(batch, tuple(size), mode=mode.value, antialias=antialias)
    return scaled.view(*image.shape[:-2], *size)


def normalize(image: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, inplace: bool) -> torch.Tensor:
    return (image - mean[:, None, None]) / std[:, None, None]


def pil_to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _put_functions() -> None:
    for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
        module: Any = ModuleType(f"torchvision{name}")
        module.__spec__, module.__path__ = ModuleSpec(module.__name__, None), []
        module.__version__ = "0.28.0"
        vars(module).update({f.__name__: f for f in (InterpolationMode, resize, normalize, pil_to_tensor)})
        sys.modules[module.__name__] = module
        parent, _, own = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)


def main() -> None:
    _put_functions()
    from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

    for folder in map(Path, sys.argv[1:]):
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        own = settings.pop("image_processor_type")
        module = importlib.import_module(f"transformers.models.{_MODULES[own]}.image_processing_{_MODULES[own]}")
        processor = getattr(module, own)(**settings)
        layout: Any = SimpleNamespace(**TOKENS, image_processor=processor)
        for name in _COUNTING:
            setattr(layout, name, getattr(Lfm2VlProcessor, name).__get__(layout))
        for file in folder.glob("*.png"):
            if own != "Lfm2VlImageProcessor":
                np.savez(file.with_suffix(".npz"), **processor([Image.open(file)], return_tensors="np"))
                continue
            found = processor([Image.open(file)], return_row_col_info=True, return_tensors="pt")
            text = Lfm2VlProcessor.replace_image_token(layout, found, 0, use_image_special_tokens=True, **settings)
            tensors = {name: found[name].numpy() for name in ("pixel_values", "pixel_attention_mask", "spatial_shapes")}
            np.savez(file.with_suffix(".npz"), text=np.array(text), **tensors)


if __name__ == "__main__":
    main()
