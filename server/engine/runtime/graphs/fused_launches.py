"""Which fused launches a step makes, and how many it could make: a pass that matches nothing loses speed silently.

The launches are counted while a forward pass runs, not while it is compiled, because inductor's passes do not run for
code that an earlier start has left on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from nf4_kernels import ops
from server.engine.runtime.attention.calls import ATTEND_ROTARY
from server.engine.runtime.attention.graph_backend import DecodeForm
from server.engine.runtime.compile.passes.matching import bound_arguments
from server.engine.runtime.model.decoder import decoder_layers
from server.engine.runtime.model.exchanged import ReducedLinear
from server.engine.runtime.model.projections import GroupMember, NF4Linear
from server.engine.runtime.trials import failure

logger = logging.getLogger(__name__)

_GATED_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclass
class FusedLaunches:
    """How many launches of all layers are fused, by kind."""

    norms: int = 0
    """GEMMs that normalise their input."""
    residuals: int = 0
    """GEMMs that add the residual."""
    gates: int = 0
    """GEMMs of gates and ups that give activation(gate) * up."""
    rotary: int = 0
    """Attention that computes the rotary embedding."""
    tiled: int = 0
    """GEMMs that read tiled activations, which the launch in front has written."""


class _Counter(TorchDispatchMode):
    """Counts fused operations as they are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = FusedLaunches()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: torch.compile refuses to run its functions under other modes."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = self.found
        if func is ATTEND_ROTARY:
            found.rotary += 1
        elif getattr(func, "namespace", "") == "nf4":
            given = bound_arguments(func, args, kwargs or {})
            found.norms += given.get("norm_weight") is not None
            found.residuals += given.get("residual") is not None
            found.gates += func is torch.ops.nf4.gated_linear.default
            found.tiled += "tiles" in given
        return func(*args, **(kwargs or {}))


def count_fused(forward: Callable[[], object]) -> FusedLaunches | None:
    """The fused launches of one forward(), which has been compiled before; None where they cannot be counted."""
    counter = _Counter()

    def run() -> None:
        with counter:
            forward()

    failed = failure(run)
    if failed is not None:
        logger.info("fused launches cannot be counted: %s", failed)
    return counter.found if failed is None else None


def possible_launches(model: PreTrainedModel, tokens: int, applies_rotary: bool) -> FusedLaunches:
    """How many fused launches a step of tokens could make, if every pattern of model's layers matched.

    Counts, over all decoder layers, the places for which the device has a fused launch: GEMMs directly behind a norm
    without an offset, GEMMs directly in front of a residual sum, GEMMs of gates and ups, attention, and GEMMs whose input
    the launch in front could write tiled. Projections with room for adapters do not count.
    """
    found = FusedLaunches()
    gated_activation = _hidden_act(model) in _GATED_ACTIVATIONS

    def gemm_of(module: nn.Module | None, name: str) -> NF4Linear | None:
        """The GEMM, if the passes may fuse it: if it is in bfloat16 and has no expanded weight; else None."""
        gemm = _gemm(module, name)
        return gemm if gemm is not None and _may_fuse(gemm, model, tokens) else None

    for layer in decoder_layers(model):
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        # Models with norms behind attention and MLP (Gemma 2 and 3) have no GEMM in front of a residual sum.
        between = hasattr(layer, "pre_feedforward_layernorm")
        mlp_norm = "pre_feedforward_layernorm" if between else "post_attention_layernorm"
        queries, gates = gemm_of(attention, "q_proj"), gemm_of(mlp, "gate_proj")
        gated = False
        if queries is not None:
            found.norms += _fuses(queries, tokens, _is_plain_norm(getattr(layer, "input_layernorm", None)))
        if gates is not None:
            normalised = _fuses(gates, tokens, _is_plain_norm(getattr(layer, mlp_norm, None)))
            gated = gated_activation and ops.can_gate(*gates.planned(tokens), normalised)
            found.norms += normalised
        found.gates += gated
        found.rotary += applies_rotary
        for gemm, tiles in ((gemm_of(attention, "o_proj"), applies_rotary), (gemm_of(mlp, "down_proj"), gated)):
            if gemm is not None:
                found.residuals += not between and ops.can_fuse(*gemm.planned(tokens), False)
                found.tiled += tiles and _tile(gemm, tokens) > 0
    return found


def decode_forms(model: PreTrainedModel, sizes: Iterable[int], rotary_from: int) -> set[DecodeForm]:
    """The forms of attention that decode graphs of these sizes are likely to ask for.

    rotary_from: the size from which on attention computes rotary embeddings.
    """
    found: set[DecodeForm] = set()
    seen: set[object] = set()
    for layer in decoder_layers(model):
        attention = getattr(layer, "self_attn", None)
        output, norms = getattr(attention, "o_proj", None), hasattr(attention, "q_norm")
        # Of several ranks each has a part of it, behind whose sum nothing is fused, but in front of which tiles are.
        part = output.linear if isinstance(output, ReducedLinear) else output
        gemm = part if isinstance(part, NF4Linear) else None
        key = norms, None if gemm is None else (gemm.out_features, gemm.in_features, gemm.expanded is None)
        if key in seen:
            continue
        seen.add(key)
        for size in sizes:
            rotary = size >= rotary_from
            tiled = rotary and gemm is not None and _may_fuse(gemm, model, size)
            found.add(DecodeForm(rotary, rotary and norms, _tile(gemm, size) if tiled and gemm is not None else 0))
    return found


def report_fused(found: FusedLaunches, possible: FusedLaunches) -> None:
    """Log how many launches of those possible are fused, and warn of each kind of which none is."""
    counts = {f.name: (getattr(found, f.name), getattr(possible, f.name)) for f in fields(FusedLaunches)}
    counts = {name: pair for name, pair in counts.items() if pair[1]}
    if counts:
        logger.info("fused: %s", ", ".join(f"{name} {done}/{most}" for name, (done, most) in counts.items()))
    for name, (done, most) in counts.items():
        if done == 0:
            logger.warning(
                "none of %d %s is fused, though the device has the launch: decode steps are slower"
                " (this model's code may differ from what the passes match)",
                most,
                name,
            )


def _gemm(module: nn.Module | None, name: str) -> NF4Linear | None:
    """The GEMM that computes a projection, alone or first of its group; None where it is no plain NF4 one."""
    linear = getattr(module, name, None)
    if isinstance(linear, GroupMember):
        linear = linear.linear
    return linear if isinstance(linear, NF4Linear) else None


def _may_fuse(gemm: NF4Linear, model: PreTrainedModel, tokens: int) -> bool:
    """Whether the passes may fuse a GEMM of so many tokens: in bfloat16, and by the codes."""
    return model.dtype is torch.bfloat16 and not gemm.uses_copy(tokens)


def _tile(gemm: NF4Linear, tokens: int) -> int:
    """The token tile in which the launch in front could write the input of a GEMM that may be fused; 0: it could not."""
    return 0 if gemm.in_features % 256 else ops.token_tile(*gemm.planned(tokens))


def _fuses(gemm: NF4Linear, tokens: int, plain_norm: bool) -> bool:
    """Whether a GEMM behind a norm has a launch with it."""
    return plain_norm and ops.can_fuse(*gemm.planned(tokens), True)


def _is_plain_norm(norm: nn.Module | None) -> bool:
    """Whether a norm multiplies by its weight as it is, not by 1 + weight as Gemma's does."""
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None or getattr(norm, "bias", None) is not None:
        return False
    # The root mean square of ones is 1, so what the norm makes of them is what it multiplies by.
    scale = norm(torch.ones_like(weight)[None])[0].float()
    return bool((scale - weight.float()).abs().mean() < 0.5)


def _hidden_act(model: PreTrainedModel) -> str | None:
    text = model.config.get_text_config()
    name: str | None = getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", None)
    return name
