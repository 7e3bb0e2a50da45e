"""transformers' own processor of a checkpoint, for images only and without torch: pixels to tensors and placeholders."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from server.checkpoint.base import CheckpointError
from server.checkpoint.images import image_token_id
from server.checkpoint.inspection import read_json
from server.checkpoint.tokenizer_files import load_tokenizer
from server.images.decoding import ImageError
from server.images.lfm2_vl import Lfm2VlLayout
from server.images.pil_processors import PIL_PROCESSORS

TENSORS = (
    "pixel_values", "pixel_attention_mask", "spatial_shapes", "image_sizes", "image_grid_thw", "image_position_ids",
)  # fmt: skip
"""Tensors of image processors that image towers take."""

Tensors = dict[str, npt.NDArray[Any]]


class ImageProcessor:
    """Preparation of images as a checkpoint's files have it."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError."""
        self._tokenizer = load_tokenizer(folder)
        self._token_id = image_token_id(folder)
        try:
            self._processor = _load(folder, self._tokenizer)
        except Exception as e:
            reason = " ".join(str(e).split()) or type(e).__name__
            raise CheckpointError(f"{folder}: its image processor cannot be loaded: {reason[:300]}") from e

    @property
    def placeholder(self) -> str:
        """Text that the chat template writes for an image."""
        return str(self._processor.image_token)

    def prepare(self, image: Image.Image) -> tuple[Tensors, str, int]:
        """(tensors for the tower, of a batch of this image; the text that stands for it; how many tokens of that are its).

        Raises ImageError for an image that the processor does not take.
        """
        try:
            options = self._processor._merge_kwargs(tokenizer_init_kwargs=self._tokenizer.init_kwargs)
            given = {**options["images_kwargs"], "return_tensors": "np"}
            found, texts = self._processor._process_images([image], **given)
        except MemoryError:
            raise
        except Exception as e:
            raise ImageError(f"is not one that the model takes: {' '.join(str(e).split())[:200]}") from e
        tensors = {name: np.ascontiguousarray(found[name]) for name in TENSORS if name in found}
        if "pixel_attention_mask" in tensors:  # zeros and ones of 8 bytes for each pixel
            tensors["pixel_attention_mask"] = tensors["pixel_attention_mask"].astype(bool)
        ids = self._tokenizer.encode(texts[0], add_special_tokens=False)
        return tensors, texts[0], ids.count(self._token_id)


def _load(folder: Path, tokenizer: Any) -> Any:
    """The checkpoint's processor, as its class loads it, but for the parts that only videos and sounds need."""
    from transformers import AutoConfig, AutoImageProcessor

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if config.model_type == "lfm2_vl":
        return Lfm2VlLayout(folder, tokenizer)
    # The processors that are written for Pillow and numpy: the others need torchvision.
    load = PIL_PROCESSORS.get(config.model_type)
    options: dict[str, Any] = {"backend": "pil", "local_files_only": True, "trust_remote_code": False}
    images = load(folder) if load else AutoImageProcessor.from_pretrained(folder, **options)
    if type(images).__name__.startswith("Pixtral"):
        return PixtralLayout(folder, images)
    processor_class = _processor_class(config)
    given = {"image_processor": images, "tokenizer": tokenizer}

    class ImagesOnly(processor_class):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)  # None stands for the processor of videos, which needs torchvision

    settings, _ = processor_class.get_processor_dict(folder, local_files_only=True)
    settings = {key: value for key, value in settings.items() if not key.endswith(("_processor", "tokenizer"))}
    return ImagesOnly.from_args_and_dict([given.get(name) for name in processor_class.get_attributes()], settings)


def _processor_class(config: Any) -> Any:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    found = PROCESSOR_MAPPING[type(config)]
    module = sys.modules[found.__module__]
    if getattr(module, "num2words", module) is None:
        module.num2words = str  # type: ignore[attr-defined] # SmolVLM's asks for this package, which only videos need
    return found


class PixtralLayout:
    """As transformers' PixtralProcessor, whose module needs torchvision even for images alone: a token ends each row."""

    def __init__(self, folder: Path, image_processor: Any) -> None:
        settings = _settings(folder)
        self.image_token = str(settings.get("image_token", "[IMG]"))
        self._row_end = str(settings.get("image_break_token", "[IMG_BREAK]"))
        self._end = str(settings.get("image_end_token", "[IMG_END]"))
        self._patch = int(settings.get("patch_size", 16)) * int(settings.get("spatial_merge_size", 1))
        self._image_processor = image_processor

    def _merge_kwargs(self, **_: Any) -> dict[str, dict[str, Any]]:
        return {"images_kwargs": {"patch_size": self._patch}}

    def _process_images(self, images: list[Image.Image], **options: Any) -> tuple[Any, list[str]]:
        longest = self._image_processor.size.longest_edge
        for width, height in (image.size for image in images):
            if longest is not None and min(width, height) * longest < max(width, height):
                # Scaled to the longest edge it would have no pixels.
                raise ValueError(f"its sides of {width} and {height} pixels differ too much")
        found = self._image_processor(images, **options)
        texts = []
        for height, width in np.asarray(found["image_sizes"]).tolist():
            if height * width <= self._patch**2:
                raise ValueError(f"it is smaller than two patches of {self._patch} x {self._patch} pixels")
            row = self.image_token * (width // self._patch)
            texts.append(self._row_end.join([row] * (height // self._patch)) + self._end)
        return found, texts


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "processor_config.json"
    return read_json(file) if file.exists() else {}
