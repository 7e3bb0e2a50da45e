"""A model's image tower: from an image's pixels to the features that stand in for its placeholders' embeddings."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from server.checkpoint.images import whole_images
from server.checkpoint.names import TOWERS
from server.engine.runtime.image_rows import ImageRows
from server.engine.runtime.trials import first_line
from server.engine.scheduling.prompt_images import ImageError, PromptImage, PromptImages
from server.types import ImageInput

FEATURE_CACHE_BYTES = 512 * 2**20
"""Bytes of host memory for the features of the images that were seen last."""


@dataclass(frozen=True)
class ImageFeatures:
    """Features of an image of n placeholders."""

    embeddings: torch.Tensor
    """[n, hidden size], in the model's dtype."""
    added: tuple[torch.Tensor, ...] = ()
    """[n, hidden size] each: what is added to the hidden states behind the first decoder layers (Qwen3-VL)."""

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.embeddings.nbytes + sum(tensor.nbytes for tensor in self.added)

    def in_host_memory(self) -> ImageFeatures:
        """The same, in host memory."""
        return ImageFeatures(self.embeddings.cpu(), tuple(tensor.cpu() for tensor in self.added))


class ImageTower:
    """The tower of a multimodal model, which runs once for an image; not thread-safe."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache: OrderedDict[bytes, ImageFeatures] = OrderedDict()
        self._cached_bytes = 0
        self.runs = 0
        """Images that the tower has computed."""
        self.seconds = 0.0
        """Seconds that the tower has worked on them; on CUDA by the device's clock."""
        self.hits = 0
        """Times that an image's features were asked for and found."""
        config = model.config
        self.token_id = int(getattr(config, "image_token_id", None) or config.image_token_index)
        """The placeholder's token."""
        # Where positions have three axes, the model's class says how an image's tokens are numbered.
        self._numbering = getattr(model.base_model, "get_rope_index", None)
        whole = whole_images(config)
        self.whole = whole is not None
        """Whether an image's tokens see one another in both directions."""
        self.past_windows = whole == "all, past windows"
        """Whether they do so where a layer's window ends between them, too."""

    def layout(self, tokens: Sequence[int], images: Sequence[ImageInput]) -> PromptImages:
        """The images of a prompt in the places of its placeholders. Raises ImageError where they do not fit there."""
        ids = np.array(tokens, np.int64)
        placed = []
        end = 0
        for image in images:
            if not end <= image.start < image.end <= len(ids):
                raise ImageError("the images' places do not follow one another in the prompt")
            end = image.end
            places = np.flatnonzero(ids[image.start : end] == self.token_id) + image.start
            if not len(places) or (places[0], places[-1]) != (image.start, end - 1):
                raise ImageError("an image has no placeholders where it says that they are")
            placed.append(PromptImage(image.key, places, image.file))
        return PromptImages(placed, self._positions(ids, placed), self.whole, self.past_windows)

    def _positions(self, ids: np.ndarray[Any, Any], images: Sequence[PromptImage]) -> np.ndarray[Any, Any] | None:
        if self._numbering is None:
            return None
        kinds = np.zeros_like(ids)
        for image in images:
            kinds[image.places] = 1
        grids = torch.cat([_read(image.file, ("image_grid_thw",))["image_grid_thw"] for image in images])
        found, _ = self._numbering(torch.from_numpy(ids)[None], torch.from_numpy(kinds)[None], image_grid_thw=grids)
        positions: np.ndarray[Any, Any] = found[:, 0].numpy()
        return positions

    def features(self, image: PromptImage) -> ImageFeatures:
        """The features that stand in for the image's placeholders, computed unless the image is among those seen last.

        On the model's device if it has just been computed, else in host memory.

        Raises ImageError where the tower fails or gives another number of rows than the image has placeholders.
        """
        found = self._cache.get(image.key)
        if found is None:
            tensors = _read(image.file)
            found = self._timed_features(tensors)
            self.runs += 1
            if found.nbytes <= FEATURE_CACHE_BYTES:
                self._cache[image.key] = found.in_host_memory()
                self._cached_bytes += found.nbytes
                while self._cached_bytes > FEATURE_CACHE_BYTES:
                    self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        else:
            self._cache.move_to_end(image.key)
            self.hits += 1
        if len(found.embeddings) != len(image.places):
            raise ImageError(
                f"an image has {len(image.places)} placeholders, the model's tower makes {len(found.embeddings)} rows of it"
            )
        return found

    def _timed_features(self, tensors: Mapping[str, torch.Tensor]) -> ImageFeatures:
        try:
            with self._timed():
                return self._compute(tensors)
        except torch.AcceleratorError:
            raise  # the device's context is lost
        except Exception as e:
            # The tower is transformers' own, and what it gets is the client's picture.
            raise ImageError(f"the model's image tower failed: {type(e).__name__}: {first_line(e)}") from e

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the time of the work within to seconds. On CUDA wait for it, as the copy to host memory behind it does."""
        if self._model.device.type != "cuda":
            begun = time.perf_counter()
            yield
            self.seconds += time.perf_counter() - begun
            return
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        yield
        last.record()
        last.synchronize()
        self.seconds += first.elapsed_time(last) / 1000

    def _compute(self, tensors: Mapping[str, torch.Tensor]) -> ImageFeatures:
        given = {name: tensor.to(self._model.device) for name, tensor in tensors.items()}
        given["pixel_values"] = given["pixel_values"].to(self._model.dtype)
        output = self._model.get_image_features(**given, return_dict=True)
        rows = output.pooler_output
        embeddings = rows if isinstance(rows, torch.Tensor) else torch.cat(list(rows))
        deep = getattr(output, "deepstack_features", None) or ()
        added = tuple(each if isinstance(each, torch.Tensor) else torch.cat(list(each)) for each in deep)
        return ImageFeatures(_as_rows(embeddings), tuple(map(_as_rows, added)))

    def with_features(self, images: ImageRows) -> ImageRows:
        """The images in a batch with their features. Raises as features() does."""
        if not images.parts:
            return images
        device, dtype = self._model.device, self._model.dtype
        found = [self.features(part.image) for part in images.parts]

        def gathered(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            own = [t[part.first : part.first + part.count] for part, t in zip(images.parts, tensors, strict=True)]
            return torch.cat([rows.to(device, dtype) for rows in own])

        layers = len(found[0].added)
        added = [gathered([features.added[layer] for features in found]) for layer in range(layers)]
        stacked = torch.stack([gathered([features.embeddings for features in found]), *added])
        return replace(images, layers=layers, features=stacked)


def has_tower(model: PreTrainedModel) -> bool:
    """Whether the tower of a model's class is loaded."""
    parts = (getattr(model.base_model, name, None) for name in TOWERS)
    return hasattr(model, "get_image_features") and any(isinstance(part, torch.nn.Module) for part in parts)


def _read(file: str, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a prepared image, all unless names are given. Raises ImageError where the file is not there."""
    try:
        with safe_open(file, framework="pt") as stored:
            return {name: stored.get_tensor(name) for name in names or stored.keys()}
    except (OSError, SafetensorError) as e:
        raise ImageError(f"a prepared image cannot be read: {' '.join(str(e).split())}") from e


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1])
