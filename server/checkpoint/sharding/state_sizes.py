"""The sizes of layers with states that are divided: heads of linear attention, channels of short convolutions."""

from __future__ import annotations

from typing import Any

from server.checkpoint.states import STATE_KINDS, has_states, kinds_of_layers

_DELTA, _CONVOLUTION, _MAMBA = "linear_attention", "conv", "mamba"


def undivided_states(text: Any) -> str | None:
    """The layers with states of a text model that cannot be divided yet, in words."""
    others = _kinds(text) - {_DELTA, _CONVOLUTION}
    return "layers with Mamba2's states, which are not split yet" if others else None


def state_sizes(text: Any, blocksize: int) -> list[tuple[int, int]]:
    """Sizes that are divided: (size, what each shard's part of it has to be a multiple of). blocksize: of NF4 weights."""
    kinds, sizes = _kinds(text), []
    if _DELTA in kinds:
        heads, dim = text.linear_num_value_heads, text.linear_value_head_dim
        sizes += [(text.linear_num_key_heads, 1), (heads, 1), (heads * dim, blocksize)]
    if _CONVOLUTION in kinds:
        sizes.append((text.hidden_size, blocksize))
    return sizes


def states_in_words(text: Any) -> str:
    """Names of what is divided, as the end of a list; empty in models without states."""
    kinds, words = _kinds(text), ""
    if _DELTA in kinds:
        words += (
            f", in linear attention {text.linear_num_key_heads} key heads and {text.linear_num_value_heads} value heads"
        )
        words += f" of {text.linear_value_head_dim} features"
    return words + (f", in convolutions {text.hidden_size} channels" if _CONVOLUTION in kinds else "")


def narrow_states(text: Any, count: int) -> None:
    """Make a configuration one of a shard of count: with as many heads of linear attention as the shard has."""
    if _DELTA in _kinds(text):
        text.linear_num_key_heads //= count
        text.linear_num_value_heads //= count


def _kinds(text: Any) -> set[str]:
    """The kinds of a text model's layers with states, by their names in configurations, which may call Mamba2 attention."""
    kinds = {kind for kind in kinds_of_layers(text) if kind in STATE_KINDS} if has_states(text) else set()
    is_delta = getattr(text, "linear_num_key_heads", None) is not None
    return {_MAMBA if kind == _DELTA and not is_delta else kind for kind in kinds}
