"""The modules that a layer of transformers' consists of, for the rules that read it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

_DROPOUTS = (nn.Dropout, nn.Identity)


class UnknownLayerError(Exception):
    """No rule describes a layer; the message says what it has, in one line."""


def children_of(module: nn.Module, needed: tuple[str, ...]) -> Mapping[str, nn.Module]:
    """A module's children but for those that do nothing; UnknownLayerError if it lacks one or has parameters itself."""
    found = {name: child for name, child in module.named_children() if not isinstance(child, _DROPOUTS)}
    missing = [name for name in needed if name not in found]
    # The attention's backend has seen the sinks, the router gets the bias.
    own = [name for name, _ in module.named_parameters(recurse=False) if name not in ("sinks", "expert_bias")]
    if missing or own:
        raise UnknownLayerError(f"{type(module).__name__} has {', '.join([*found, *own])}")
    return found
