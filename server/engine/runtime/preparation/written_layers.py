"""Puts written decoder layers in the place of transformers' own, if every layer computes the same in a warm-up check."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from server.config import WRITTEN_LAYERS_VARIABLE
from server.engine.runtime.attention.base import AttentionOptions
from server.engine.runtime.attention.paged_cpu import PagedCpuBackend
from server.engine.runtime.exchange import agreed, is_alone
from server.engine.runtime.layers.decoder import DecoderLayer
from server.engine.runtime.layers.experts import Experts
from server.engine.runtime.layers.outer import write_norm, write_rotary
from server.engine.runtime.layers.parallel_experts import ParallelExperts
from server.engine.runtime.layers.parts import UnknownLayerError
from server.engine.runtime.layers.rotary_functions import rotating
from server.engine.runtime.layers.small_steps import MAX_TOKENS, SmallSteps, UnsuitableError
from server.engine.runtime.layers.spec import attention_name, read_layer
from server.engine.runtime.layers.stateful.state_layers import StateLayers
from server.engine.runtime.model.decoder import decoder_layers, outer_modules
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.trial_steps import TrialSteps
from server.engine.runtime.trials import DifferenceError, failure

logger = logging.getLogger(__name__)

_OWN = (
    "layers run by transformers' own code, more slowly, as norms, activations and rotary angles are separate operations"
)
_ELSEWHERE = "so it is on another rank"
_MIXTURES = Experts, ParallelExperts
_TOKENS = (1, 17)
"""Tokens of the steps on which layers are compared."""
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.04, torch.float16: 0.01}
"""Largest difference in what a layer adds to its input, relative to the norm of that."""
_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""The same relative to the norm of the layer's result, which each side rounds."""


def write_layers(paged: PagedModel, options: Sequence[AttentionOptions]) -> list[DecoderLayer]:
    """Put written layers in the place of paged's decoder layers, and return them; none, if transformers' own stay.

    The log says why they stay. options: how each layer attends. Call in inference mode.
    """
    steps = TrialSteps(paged)
    if os.environ.get(WRITTEN_LAYERS_VARIABLE) == "0":
        logger.info("%s: %s is 0", _OWN, WRITTEN_LAYERS_VARIABLE)
        return []
    layers = decoder_layers(paged.model)
    written: list[DecoderLayer] = []
    names = [(layer, attention_name(layer)) for layer in layers]
    attentions = [getattr(layer, name) for layer, name in names if name is not None]
    rotates = rotating(attentions, lambda: steps.run(1))

    def read() -> str | None:
        try:
            written.extend(_read(layers, options, paged.states, rotates))
        except UnknownLayerError as e:
            return str(e)
        return None

    unknown: list[str | None] = []
    failed = failure(lambda: unknown.append(read())) or next(iter(unknown), None)
    if not agreed(failed is None):
        logger.info("%s: %s", _OWN, failed or _ELSEWHERE)
        return []
    outputs: dict[int, int] = {}
    failed = failure(lambda: outputs.update(_compare(steps, layers, written, paged.dtype)))
    if not agreed(failed is None):
        logger.warning("%s: the written ones differ, %s", _OWN, failed or _ELSEWHERE)
        return []
    plain = [steps.several(count) for count in _TOKENS]
    undo = _put(paged, layers, [_shaped(layer, outputs.get(index)) for index, layer in enumerate(written)])
    # All steps, because other ranks compute them, too.
    found = [steps.difference(steps.several(count), own, count) for count, own in zip(_TOKENS, plain, strict=True)]
    failed = next(filter(None, found), None)
    if not agreed(failed is None):
        logger.warning("%s: with the written ones logits %s", _OWN, failed or _ELSEWHERE)
        undo()
        return []
    logger.info(
        "layers run by the server's own code: in a warm-up check, logits were within %.1e of those by transformers'",
        steps.largest_error,
    )
    if isinstance(paged.backend, PagedCpuBackend) and is_alone():
        _use_small_steps(paged, written, paged.backend, steps)
    return written


def _read(
    layers: Sequence[nn.Module],
    options: Sequence[AttentionOptions],
    states: StateLayers | None,
    rotates: Sequence[bool],
) -> list[DecoderLayer]:
    """The written layers for transformers' modules. options, rotates: of those that attend. Raises UnknownLayerError."""
    attending = [attention_name(layer) is not None for layer in layers]
    if sum(attending) != len(options):
        raise UnknownLayerError(f"{sum(attending)} of {len(layers)} layers have attention, and {len(options)} attend")
    written, numbered = [], iter(zip(range(len(options)), options, rotates, strict=True))
    for layer, attends in zip(layers, attending, strict=True):
        index, own, is_rotary = next(numbered) if attends else (-1, None, False)
        written.append(read_layer(layer, index, own, states, is_rotary))
    return written


def _use_small_steps(
    paged: PagedModel, written: Sequence[DecoderLayer], backend: PagedCpuBackend, steps: TrialSteps
) -> None:
    """Compute steps of few tokens in one C call, if that gives the same logits."""
    batches = [steps.first_chunk(count) for count in (1, MAX_TOKENS)]
    expected = [paged.run(batch) for batch in batches]

    def attempt() -> None:
        small = SmallSteps(paged.model, written, backend)
        for batch, logits in zip(batches, expected, strict=True):
            wrong = steps.difference(small.run(batch), logits, batch.num_tokens)
            if wrong is not None:
                raise DifferenceError(f"logits {wrong}")
        paged.small_steps = small

    failed = failure(attempt, UnsuitableError)
    if failed is not None:
        logger.info("steps of few tokens go through the model's class, and take up to half as long again: %s", failed)


def _compare(
    steps: TrialSteps, layers: Sequence[nn.Module], written: Sequence[DecoderLayer], dtype: torch.dtype
) -> dict[int, int]:
    """Run steps by the layers' own code, and each written layer on what its own was given. Raises DifferenceError.

    Returns how many outputs those have that give a tuple of them.
    """
    # All of them, also after a difference, because other ranks wait for this one's part of every sum.
    comparisons = [_Comparison(index, own, dtype) for index, own in enumerate(written)]
    handles = [
        layer.register_forward_hook(comparison.hook, with_kwargs=True)
        for layer, comparison in zip(layers, comparisons, strict=True)
    ]
    try:
        for count in _TOKENS:
            steps.several(count)
    finally:
        for handle in handles:
            handle.remove()
    _check(comparisons)
    return {each.index: each.outputs for each in comparisons if each.outputs is not None}


def _shaped(layer: DecoderLayer, outputs: int | None) -> Callable[..., Any]:
    """The written layer, giving a tuple of that many outputs if transformers' own does; all but the first are None."""
    if outputs is None:
        return layer
    return lambda *args, **named: (layer(*args, **named), *[None] * (outputs - 1))


class _Comparison:
    """What a written layer gives beside transformers' own, for what this one is given."""

    def __init__(self, index: int, written: DecoderLayer, dtype: torch.dtype) -> None:
        self.index = index
        self.outputs: int | None = None
        """Outputs of the own layer, if it gives a tuple of them."""
        self.is_mixture = isinstance(written.mlp, _MIXTURES)
        self.count = 0
        """Steps, or tokens of a mixture of experts, that were compared."""
        self.failed: list[tuple[float, int]] = []
        """Error and tokens of the step of each that differs by more than rounding."""
        self._written, self._dtype = written, dtype

    def hook(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A forward hook of the own layer."""
        given = dict(kwargs)
        x: torch.Tensor = args[0] if args else given.pop("hidden_states")
        expected: torch.Tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(output, tuple):
            self.outputs = len(output)
        found = self._written(x.clone(), *args[1:], **given)
        rows = x.shape[-2] if self.is_mixture else 1
        own, other, before = (each.float().reshape(rows, -1) for each in (expected, found, x))
        added, error = (own - before).norm(dim=1), (other - own).norm(dim=1)
        allowed = _TOLERANCES[self._dtype] * added + _ROUNDING[self._dtype] * own.norm(dim=1)
        self.count += rows
        self.failed += [(share, x.shape[-2]) for share in (error / added)[~(error <= allowed)].tolist()]


def _check(comparisons: Sequence[_Comparison]) -> None:
    """Raise DifferenceError if written layers differ from transformers' own by more than rounding.

    A router chooses another expert for some tokens by rounding: for one in twelve with 128 random experts in bfloat16. So
    half of the tokens of a layer with a mixture of experts may differ, and a quarter of those of all such layers.
    """
    mixtures = [each for each in comparisons if each.is_mixture]
    failed, count = sum(len(each.failed) for each in mixtures), sum(each.count for each in mixtures)
    for each in comparisons:
        is_wrong = len(each.failed) > each.count // 2 or 4 * failed > count if each.is_mixture else bool(each.failed)
        if is_wrong and each.failed:
            error, tokens = each.failed[0]
            raise DifferenceError(f"layer {each.index} by {error:.1e} with {tokens} tokens")


def _put(paged: PagedModel, layers: Sequence[nn.Module], written: Sequence[Callable[..., Any]]) -> Callable[[], None]:
    """Put the written layers in place, and launches of ours for what runs once for all of them; returns what undoes it."""
    replaced: dict[nn.Module, Callable[..., Any]] = dict(zip(layers, written, strict=True))
    for module in outer_modules(paged.model):
        forward = write_norm(module) or write_rotary(module, has_axes=paged.tower is not None)
        if forward is not None:
            replaced[module] = forward
    embedding: Any = paged.model.get_input_embeddings()
    if paged.device.type == "cuda" and type(embedding) is nn.Embedding and embedding.max_norm is None:
        # torch's embedding reads up to 16 rows one after another: 13 us of an H200 for 16 tokens, where indexing takes 2.
        replaced[embedding] = embedding.weight.__getitem__
    for module, forward in replaced.items():
        module.forward = forward

    def undo() -> None:
        for module in replaced:
            del module.forward

    return undo
