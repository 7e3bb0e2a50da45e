"""The images in a step's chunks: which rows are placeholders, and where positions and attention follow other rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from server.engine.scheduling.prompt_images import PromptImage
from server.engine.scheduling.step import Chunk

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ImagePart:
    """The features [first, first + count) of an image stand in for the embeddings of rows of the batch."""

    image: PromptImage
    first: int
    count: int


@dataclass(frozen=True)
class ImageRows:
    """The images in a batch of T tokens."""

    rows: IntArray
    """[R]: the rows of all placeholders, ascending."""
    parts: Sequence[ImagePart] = ()
    """Images whose features stand in for these rows, in the same order; none where another rank has the image tower."""
    axes: Sequence[tuple[int, IntArray]] = ()
    """(a first row, positions [3, rows]) of chunks whose positions differ by axis."""
    seen: IntArray | None = None
    """[2, T]: the first and the last place of what each token sees of its image, whatever a layer's window is.

    Its own place twice for a token that has no image. None if all tokens attend causally.
    """
    layers: int = 0
    """Behind how many of the first decoder layers features are added to the hidden states; known with the features."""
    features: torch.Tensor | None = None
    """[1 + layers, R, hidden size]: what stands in for the rows' embeddings, and what is added behind each layer.

    None before the tower has computed them, where there are no rows, and where another rank has the image tower.
    """


def image_rows(chunks: Sequence[Chunk], starts: IntArray, lengths: IntArray) -> ImageRows | None:
    """The images in a batch's chunks, which follow one another; None where there are none.

    starts, lengths: [chunks], each chunk's first place and its tokens, draft tokens among them.
    """
    first_rows = lengths.cumsum() - lengths
    rows: list[IntArray] = [np.zeros(0, np.int64)]
    parts: list[ImagePart] = []
    axes: list[tuple[int, IntArray]] = []
    seen: IntArray | None = None
    for chunk, row in zip(chunks, first_rows.tolist(), strict=True):
        images, start, end = chunk.sequence.images, chunk.start, chunk.start + chunk.length
        if images is None or start >= images.end:
            continue
        if images.positions is not None:
            axes.append((row, images.positions[:, start:end]))
        for image in images.within(start, end):
            first, last = np.searchsorted(image.places, (start, end)).tolist()
            if first < last:
                parts.append(ImagePart(image, first, last - first))
                rows.append(image.places[first:last] + (row - start))
        if images.whole:
            if seen is None:
                seen = np.tile(np.repeat(starts - first_rows, lengths) + np.arange(lengths.sum()), (2, 1))
            for image in images.within(start, end):
                rows_of_image = slice(row + max(image.start, start) - start, row + min(image.end, end) - start)
                seen[1, rows_of_image] = image.end - 1
                if images.past_windows:
                    seen[0, rows_of_image] = image.start
    return ImageRows(np.concatenate(rows), parts, axes, seen) if parts or axes else None
