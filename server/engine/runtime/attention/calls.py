"""The attention function of transformers' model code, and the backend in use that it calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface

from server.engine.runtime.attention.base import AttentionBackend, AttentionOptions, UnsupportedModelError

IMPLEMENTATION = "nf4_paged"
"""The name under which transformers knows our attention function."""
PROBED_IMPLEMENTATION = "nf4_paged_probed"
"""The same, for a model whose masks are looked at."""
LATENT_HEADS = "latent_heads"
"""The attribute in which modules of latent attention have LatentHeads, if their keys are latents (model/latents.py)."""


class _Active:
    """The backend of the forward pass that is running; the engine runs one at a time."""

    backend: AttentionBackend | None = None


@contextmanager
def attending(backend: AttentionBackend) -> Iterator[None]:
    """Make transformers' model code attend through backend while entered."""
    previous, _Active.backend = _Active.backend, backend
    try:
        yield
    finally:
        _Active.backend = previous


def is_attending() -> bool:
    """Whether attending() is entered."""
    return _Active.backend is not None


def active_backend() -> AttentionBackend:
    """The backend through which the forward pass that is running attends. Raises RuntimeError outside attending()."""
    if _Active.backend is None:
        raise RuntimeError("the model was called outside attending()")
    return _Active.backend


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function registered with transformers: query [1, heads, T, dim] to [1, T, heads, dim]."""
    backend = active_backend()
    for name in ("position_bias", "head_mask", "cache"):
        if others.get(name) is not None:
            raise UnsupportedModelError(f"{type(module).__name__} uses {name}, which the paged attention does not have")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to later tokens, too, and so cannot generate here"
        )
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not say which layer it is")
    if attention_mask is not None:
        backend.see_mask(layer, type(module).__name__, attention_mask)
    if s_aux is not None:
        backend.see_sinks(layer, s_aux)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(scaling, backend.windows.get(layer, sliding_window), softcap, s_aux is not None)
    # Batch 1 always: all tokens of a forward pass are one row.
    query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    heads = getattr(module, LATENT_HEADS, None)
    if heads is None:
        out = backend.attend(layer, query, key, value, options)
    else:
        out = backend.attend_latent(layer, query, key, heads, options)
    return out.unsqueeze(0), None


# No mask function of the first name is registered, and so transformers builds no masks.
AttentionInterface.register(IMPLEMENTATION, _paged_attention)
AttentionInterface.register(PROBED_IMPLEMENTATION, _paged_attention)
