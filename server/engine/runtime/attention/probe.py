"""Finds out how a model attends, by running one token through it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from server.checkpoint.classes import ATTENTION_KINDS
from server.checkpoint.states import (
    FEED_FORWARD_KINDS,
    STATE_KINDS,
    attends,
    has_states,
    kinds_of_layers,
    state_modules,
)
from server.engine.runtime.attention.base import AttentionBackend, AttentionOptions, LayerShape, UnsupportedModelError
from server.engine.runtime.attention.calls import IMPLEMENTATION, PROBED_IMPLEMENTATION, attending
from server.engine.runtime.attention.latent import LatentHeads
from server.engine.runtime.attention.masks import FARTHEST, MaskReader, UnknownMaskError
from server.engine.runtime.batch import Batch
from server.engine.runtime.limits import own_limit
from server.engine.runtime.trials import summary

_INTERFACE_SINCE = {"codegen": "5.24", "gptj": "5.24"}
"""By model_type, the version of transformers from which on a family's code goes through its attention interface.

Refusals name it; whether the installed version does so is found out by running the model.
"""


class _Probe(AttentionBackend):
    def __init__(self, contexts: int) -> None:
        """contexts: the tokens of the longest context."""
        self.contexts = contexts
        self.masks = MaskReader(PROBED_IMPLEMENTATION)
        self.windows: dict[int, int | None] = {}
        self.shapes: dict[int, LayerShape] = {}
        self.options: dict[int, AttentionOptions] = {}
        self.seen_sinks: dict[int, torch.Tensor] = {}

    def begin(self, batch: Batch) -> None:
        pass

    def see_sinks(self, layer: int, sinks: torch.Tensor) -> None:
        self.seen_sinks[layer] = sinks.detach().float().contiguous()

    def see_mask(self, layer: int, module: str, mask: torch.Tensor) -> None:
        try:
            reach = self.masks.reach(mask, self.contexts)
        except UnknownMaskError as e:
            raise UnsupportedModelError(f"{module} {e}") from e
        if reach.chunk is not None:
            raise UnsupportedModelError(
                f"{module} attends within chunks of {reach.chunk} tokens, and contexts may have {self.contexts}"
            )
        self.windows[layer] = reach.window

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        if layer in self.shapes:
            raise UnsupportedModelError(
                f"layer {layer} attends more than once, and the KV cache has one place for its keys and values"
            )
        if query.shape[1] % key.shape[1]:
            raise UnsupportedModelError(f"{query.shape[1]} query heads do not divide among {key.shape[1]} key heads")
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2], query.shape[1])
        self.options[layer] = replace(options, window=self.windows.get(layer, options.window))
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])

    def attend_latent(
        self, layer: int, query: torch.Tensor, latent: torch.Tensor, heads: LatentHeads, options: AttentionOptions
    ) -> torch.Tensor:
        out = super().attend_latent(layer, query, latent, heads, options)
        self.shapes[layer] = replace(self.shapes[layer], is_latent=True)
        return out


def _leave_unscaled(model: PreTrainedModel) -> None:
    """Keep layers from scaling their queries by position (Llama 4), for which they take a token's place in the step.

    In contexts of own_limit() the scale is 1.
    """
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and hasattr(module, "floor_scale"):
            module.attn_temperature_tuning = False


Probed = tuple[list[LayerShape], list[AttentionOptions], dict[int, torch.Tensor]]
"""Per layer: shape, options of its attention, and the sinks of those that have some (AttentionBackend.sinks)."""


def probe_layers(model: PreTrainedModel) -> Probed:
    """Switch the model to the paged attention and find out what each layer that attends keeps, and how it attends.

    Layers that attend are numbered without those that have a state of another kind. Raises
    UnsupportedModelError for a model that keeps state elsewhere (recurrent layers of kinds that are not served, shared
    caches) or whose code does not go through transformers' attention interface.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    kinds = kinds_of_layers(config)
    known = (*ATTENTION_KINDS, *STATE_KINDS, *FEED_FORWARD_KINDS) if has_states(config) else ATTENTION_KINDS
    for kind in set(kinds):
        if kind not in known:
            raise UnsupportedModelError(f"{name} has layers of the kind {kind}, which the paged cache cannot serve")
    try:
        model.get_decoder().set_attn_implementation(PROBED_IMPLEMENTATION)
    except (AttributeError, ValueError) as e:
        reason = f"{name} does not use transformers' attention interface: {e}{_remedy(config)}"
        raise UnsupportedModelError(reason) from e
    _leave_unscaled(model)
    probe = _Probe(own_limit(config) or FARTHEST)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        with attending(probe), _without_states(model), _masks_of_text(config), torch.inference_mode():
            model(input_ids=token, position_ids=token, use_cache=False)
    except (TypeError, ValueError, AttributeError, LookupError) as e:
        reason = f"{name} cannot be served: its forward fails on a prompt of text alone ({summary(e)})"
        raise UnsupportedModelError(reason) from e
    model.get_decoder().set_attn_implementation(IMPLEMENTATION)
    expected = [layer for layer in range(config.num_hidden_layers) if not kinds or attends(kinds[layer])]
    if sorted(probe.shapes) != expected:
        found = f"{len(probe.shapes)} of {len(expected)} layers use the attention interface of transformers"
        raise UnsupportedModelError(f"{name}: {found}, through which the KV cache is read{_remedy(config)}")
    if len(expected) < config.num_hidden_layers:
        _number(model, expected)
    sinks = {expected.index(layer): sinks for layer, sinks in probe.seen_sinks.items()}
    return [probe.shapes[i] for i in expected], [probe.options[i] for i in expected], sinks


@contextmanager
def _masks_of_text(config: Any) -> Iterator[None]:
    """While entered, masks say nothing of images: Gemma 4's would look up each token's image, of the probe's one token."""
    given = getattr(config, "use_bidirectional_attention", None)
    if given == "vision":
        config.use_bidirectional_attention = None
    try:
        yield
    finally:
        if given == "vision":
            config.use_bidirectional_attention = given


@contextmanager
def _without_states(model: PreTrainedModel) -> Iterator[None]:
    """While entered, what keeps a state gives zeros: its own code may compile kernels for a minute."""
    modules = state_modules(model)
    for module in modules:
        module.forward = lambda hidden_states, *_, **__: torch.zeros_like(hidden_states)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _number(model: PreTrainedModel, attending: list[int]) -> None:
    """Make the numbers that layers attend by places among those that do. attending: their places among all layers."""
    for module in model.get_decoder().modules():
        if hasattr(module, "is_causal") and getattr(module, "layer_idx", None) in attending:
            module.layer_idx = attending.index(module.layer_idx)


def _remedy(config: Any) -> str:
    """The end of a refusal's message: which transformers serves the family, where a newer one than this does."""
    since = _INTERFACE_SINCE.get(config.model_type)
    installed = transformers.__version__
    return "" if since is None else f"; it needs transformers {since} or newer, {installed} is installed"
