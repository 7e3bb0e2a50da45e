"""A model's decoder layers, whatever its class calls them."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

# transformers' older classes have names of their own for them.
_NAMES = ("layers", "h", "blocks", "block")


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of model's decoder, in order; none where its class keeps them under a name that is not known."""
    # Layers that only images go through have been left out.
    return [layer for layer in layer_list(model) or () if not isinstance(layer, nn.Identity)]


def layer_list(model: PreTrainedModel) -> nn.ModuleList | None:
    """What the model's class keeps its decoder's layers in; None where its name is not known."""
    decoder = model.get_decoder()
    lists = (getattr(decoder, name, None) for name in _NAMES)
    return next((layers for layers in lists if isinstance(layers, nn.ModuleList)), None)
