"""A model's decoder layers, whatever its class calls them."""

from __future__ import annotations

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

# transformers' older classes have names of their own for them.
_NAMES = ("layers", "h", "blocks", "block")
_OUTER_NAMES = ("rotary_emb", "norm", "final_layernorm", "final_layer_norm", "embedding_norm", "norm_f")


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of model's decoder, in order; none where its class keeps them under a name that is not known."""
    # Layers that only images go through have been left out.
    return [layer for layer in layer_list(model) or () if not isinstance(layer, nn.Identity)]


def outer_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Modules that the decoder runs once for all layers: rotary embeddings, and the norm behind the last layer.

    Those whose names are not known are left out.
    """
    decoder = _decoder(model)
    modules = (getattr(decoder, name, None) for name in _OUTER_NAMES)
    return [module for module in dict.fromkeys(modules) if isinstance(module, nn.Module)]


def layer_list(model: PreTrainedModel) -> nn.ModuleList | None:
    """Module that holds the decoder's layers; None if its name is not known."""
    decoder = _decoder(model)
    lists = (getattr(decoder, name, None) for name in _NAMES)
    return next((layers for layers in lists if isinstance(layers, nn.ModuleList)), None)


def without_head(model: PreTrainedModel) -> nn.Module:
    """The part of a model that gives hidden states; Llama 4's multimodal class gives itself as its base model."""
    base: nn.Module = model.base_model
    return _decoder(model) if base is model else base


def _decoder(model: PreTrainedModel) -> nn.Module:
    """Module that has the layers. Llama 4's class of text, within a multimodal one or alone, gives itself as its decoder."""
    found: nn.Module = model.get_decoder()
    inner = getattr(found, "model", None)
    return inner if isinstance(found, GenerationMixin) and isinstance(inner, nn.Module) else found
