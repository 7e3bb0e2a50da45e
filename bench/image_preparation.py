"""Random images, prepared as the image process prepares them, with the seconds of each part."""

from __future__ import annotations

import io
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor

from bench.image_shapes import ImageShape
from server.images.decoding import decode


@dataclass(frozen=True)
class Prepared:
    """An image as the engine gets it."""

    tensors: dict[str, torch.Tensor]
    file: str
    tokens: int


class Preparation:
    """Steps of the image process with an image; keeps the seconds of each."""

    def __init__(self, folder: Path, shape: ImageShape) -> None:
        self._folder, self._shape = folder, shape
        (folder / "preprocessor_config.json").write_text(json.dumps(shape.processor))
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.seconds: dict[str, list[float]] = {"decode_s": [], "processor_s": [], "write_s": []}

    def prepare(self, side: int, seed: int) -> Prepared:
        """A new image of side x side pixels."""
        from safetensors.numpy import save_file

        small = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        marks = [time.perf_counter()]
        image = decode(buffer.getvalue(), side * side)
        marks.append(time.perf_counter())
        found = self._processor(images=[image], return_tensors="np")
        tensors = {name: np.ascontiguousarray(found[name]) for name in self._shape.tensors}
        marks.append(time.perf_counter())
        file = self._folder / f"{seed}.safetensors"
        save_file(tensors, file)
        marks.append(time.perf_counter())
        for own, begun, ended in zip(self.seconds.values(), marks, marks[1:], strict=False):
            own.append(ended - begun)
        tokens = self._shape.tokens_of(found)
        return Prepared({name: torch.from_numpy(array) for name, array in tensors.items()}, str(file), tokens)
