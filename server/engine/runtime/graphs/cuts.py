"""Cuts of a captured step into several CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from transformers import PreTrainedModel

from server.engine.runtime.model.decoder import decoder_layers

# A step that is waited for is up to three graphs, which end behind these parts of the layers and the last one: the device
# computes each while the host launches the next. So the device waits for the launch of a few layers only.
_CUTS = (64, 6)


@contextmanager
def cut_layers(model: PreTrainedModel, cut: Callable[[], None] | None) -> Iterator[None]:
    """Call cut before the layers behind the parts that _CUTS has, while entered; None: nothing."""
    if cut is None:
        yield
        return
    layers = decoder_layers(model)
    places = {-(-len(layers) // part) for part in _CUTS}
    cuts = [layers[index] for index in places if index < len(layers)]
    # Written layers have a forward of their own, others their class's.
    own = [(layer, vars(layer).get("forward")) for layer in cuts]
    for layer in cuts:
        layer.forward = partial(_after, cut, layer.forward)
    try:
        yield
    finally:
        for layer, forward in own:
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _after(first: Callable[[], None], then: Callable[..., object], *args: object, **kwargs: object) -> object:
    first()
    return then(*args, **kwargs)
