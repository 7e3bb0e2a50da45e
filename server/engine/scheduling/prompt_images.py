"""The images of a sequence's prompt: which places are theirs, and which positions the prompt's tokens have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from server.engine.scheduling.errors import DataError
from server.engine.scheduling.prefix import Spanning


class ImageError(DataError, ValueError):
    """A request's image does not fit its prompt or cannot be computed: the request fails, and no other one."""


@dataclass(frozen=True)
class PromptImage:
    """One image. Its features, a row for each of its placeholders, stand in for their embeddings."""

    key: bytes
    """Names the image and how it was prepared."""
    places: npt.NDArray[np.int64]
    """Places of its placeholders in the prompt, ascending."""
    file: str
    """Inputs of the model's vision encoder (safetensors)."""

    @cached_property
    def start(self) -> int:
        """Place of the first placeholder."""
        return int(self.places[0])

    @cached_property
    def end(self) -> int:
        """Place behind the last placeholder."""
        return int(self.places[-1]) + 1


@dataclass(frozen=True)
class PromptImages:
    """The images of one prompt."""

    images: Sequence[PromptImage]
    """In the order of their places."""
    positions: npt.NDArray[np.int64] | None = None
    """[3, tokens of the prompt]: time, height and width of each token where the model's positions have three axes."""
    whole: bool = False
    """Whether an image's tokens see one another in both directions, so that they are computed in one step."""
    past_windows: bool = False
    """Whether whole images are so in layers, too, whose window is shorter."""

    @cached_property
    def spanning(self) -> list[Spanning]:
        """Keys of the images for prefix caching."""
        return [(image.start, image.end, image.key) for image in self.images]

    @cached_property
    def offset(self) -> int:
        """Difference of position and place of a token after the last image."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - self.positions.shape[1]

    @cached_property
    def end(self) -> int:
        """Place behind the last image."""
        return self.images[-1].end

    def within(self, start: int, end: int) -> list[PromptImage]:
        """The images that have placeholders among the places [start, end)."""
        return [image for image in self.images if image.start < end and image.end > start]

    def chunk_length(self, start: int, length: int, alone: bool) -> int:
        """Tokens, of length ones from place start on, that may be a chunk; 0: none in this step, as an image must be whole.

        alone: whether the step has no other chunk of a prompt. Then an image that is longer than any step is one.
        """
        end = start + length
        cut = next((image for image in self.images if self.whole and image.start < end < image.end), None)
        if cut is None:
            return length
        allowed = max(0, cut.start - start)
        return cut.end - start if allowed == 0 and alone else allowed
