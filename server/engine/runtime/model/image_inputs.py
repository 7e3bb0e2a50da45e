"""Inputs of a model in the place of token ids if a batch has images, on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from server.engine.runtime.batch import Batch, to_device
from server.engine.runtime.exchange import broadcast
from server.engine.runtime.image_rows import ImageRows

_PLACEHOLDERS_AS_OTHERS = ("gemma4", "gemma4_unified", "muse_glimmer", "muse_spark")
"""Model types whose classes embed placeholders as padding, or as token 0 (Muse)."""


@contextmanager
def image_inputs(model: PreTrainedModel, ids: torch.Tensor, images: ImageRows) -> Iterator[dict[str, Any]]:
    """While entered, the arguments that the model takes in the place of input_ids [T] of a batch with images.

    With several ranks, those that have no features get rank 0's. All must enter at the same time.
    """
    # The embedding may have no row for a placeholder's id.
    table = model.get_input_embeddings()
    ids = _embedded(model, ids).clamp(max=model.config.get_text_config().vocab_size - 1)
    embeddings = table(ids)
    extra = _per_layer(model, ids, embeddings)
    if not len(images.rows):
        yield {"inputs_embeds": embeddings[None], **extra}
        return
    features = images.features
    if features is None:
        features = embeddings.new_empty(1 + images.layers, len(images.rows), embeddings.shape[-1])
    broadcast(features)
    rows = to_device(images.rows, ids.device)
    embeddings = embeddings.index_copy(0, rows, features[0])
    if not images.layers:
        yield {"inputs_embeds": embeddings[None], **extra}
        return
    mask = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    mask[rows] = True
    deep = {"visual_pos_masks": mask[None], "deepstack_visual_embeds": list(features[1:])}

    def add(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, kwargs | deep

    hook = model.get_decoder().register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield {"inputs_embeds": embeddings[None]}
    finally:
        hook.remove()


def _embedded(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Token ids with those that the model's class embeds as another's: of images, videos and sounds, answered or sent."""
    config: Any = model.config
    row = 0 if config.model_type.startswith("muse_") else config.get_text_config().pad_token_id
    if config.model_type in _PLACEHOLDERS_AS_OTHERS:
        for name in ("image_token_id", "video_token_id", "audio_token_id"):
            token = getattr(config, name, None)
            ids = ids if token is None else torch.where(ids == token, row, ids)
    return ids


def _per_layer(model: PreTrainedModel, ids: torch.Tensor, embeddings: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inputs of each layer, if the decoder has a table of such (Gemma 4); ids: of _embedded()."""
    decoder: Any = model.get_decoder()
    if not getattr(decoder, "hidden_size_per_layer_input", 0):
        return {}
    return {"per_layer_inputs": decoder.get_per_layer_inputs(ids[None], embeddings[None])}


def positions_by_axis(batch: Batch, images: ImageRows) -> torch.Tensor:
    """The batch's positions as a model takes them: [1, T], or [3, 1, T] where they differ by axis."""
    if not images.axes:
        return batch.positions.unsqueeze(0)
    positions = batch.positions.repeat(3, 1)
    # One transfer for all chunks.
    table = to_device(np.concatenate([own for _, own in images.axes], axis=1), positions.device)
    begin = 0
    for row, own in images.axes:
        end = begin + own.shape[1]
        positions[:, row : row + own.shape[1]] = table[:, begin:end]
        begin = end
    return positions.unsqueeze(1)
