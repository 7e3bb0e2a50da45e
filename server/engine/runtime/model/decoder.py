"""A model's decoder layers, whatever its class calls them."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

# transformers' older classes have names of their own for them.
_NAMES = ("layers", "h", "blocks", "block")


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of model's decoder, in order; none where its class keeps them under a name that is not known."""
    decoder = model.get_decoder()
    for name in _NAMES:
        layers = getattr(decoder, name, None)
        if isinstance(layers, nn.ModuleList):
            # Layers that only images go through have been left out.
            return [layer for layer in layers if not isinstance(layer, nn.Identity)]
    return []
