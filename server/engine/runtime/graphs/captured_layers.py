"""The decoder layers of a step that is captured, through torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from server.checkpoint.experts.module import StackedWeight
from server.engine.runtime.compile.block_sizes import small_kernels_by_rule
from server.engine.runtime.compile.kept_layers import KeptLayers
from server.engine.runtime.compile.passes.fusion import fused_operations, name_of_passes
from server.engine.runtime.compile.pdl import dependent_launches
from server.engine.runtime.exchange import is_alone
from server.engine.runtime.model.decoder import decoder_layers, outer_modules
from server.engine.runtime.model.projections import NF4Linear

# A step that is waited for is up to three graphs, which end behind these parts of the layers and the last one: the device
# computes each while the host launches the next. So the device waits for the launch of a few layers only.
_CUTS = (64, 6)


@contextmanager
def compiled_layers(
    model: PreTrainedModel,
    size: int,
    applies_rotary: bool,
    shared: bool = False,
    cut: Callable[[], None] | None = None,
    kept: KeptLayers | None = None,
) -> Iterator[None]:
    """Run the decoder layers through torch.compile while entered; all layers of one kind share one compilation.

    What runs once for all of them is compiled, too: as the model's own operations it takes some twenty launches, 36 us.

    applies_rotary: whether the attention computes queries' and keys' norms and rotary embeddings. shared: compile apart
    from what has been compiled for graphs that are not shared. cut: called behind the parts of the layers that _CUTS has.
    size: the step's tokens. kept: what takes torch.compile's place where the code is for this size alone.
    """
    # Each size of the ladder and kind of layer is compiled once, and all of that code is kept.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 1024)
    # For shapes that it has compiled torch takes that code again, whichever passes made it: decode graphs of a size may
    # leave the rotary embedding to the attention. An option, even with the value that it has anyway, keeps code apart.
    options: dict[str, str | int | bool | Callable[..., object]] | None = None
    if shared:
        from torch._inductor import config

        options = {"epilogue_fusion": config.epilogue_fusion}
    layers, outer = decoder_layers(model), outer_modules(model)
    plain: list[Callable[..., object]] = [layer.forward for layer in layers]
    passes = name_of_passes(applies_rotary)
    for layer, forward in zip(layers, plain, strict=True):
        # Nothing is fused with cuBLAS's GEMMs, so code for any number of tokens is as fast: the second size makes it. But
        # ranks' sums add residuals in their launch, if it is known that they are small enough.
        dynamic = None if is_alone() and _is_expanded(layer, size) else False
        layer.forward = torch.compile(forward, fullgraph=True, dynamic=dynamic, options=options)
        if kept is not None and dynamic is False and passes is not None:
            layer.forward = kept.forward(layer, layer.forward, passes)
    for module in outer:
        # These gain nothing from knowing the size, so one compilation serves all sizes but 1.
        module.forward = torch.compile(module.forward, dynamic=True)
    embedding: Any = model.get_input_embeddings()
    if size > 1 and _only_reads_rows(embedding):
        # torch's embedding reads up to 16 rows one after another: 13 us of an H200 for 16 tokens, where indexing takes 2.
        embedding.forward = embedding.weight.__getitem__
        outer.append(embedding)
    try:
        with (
            cut_layers(model, cut),
            dependent_launches(),
            small_kernels_by_rule(),
            fused_operations(applies_rotary),
            NF4Linear.for_graph(),
        ):
            yield
    finally:
        for module in (*layers, *outer):
            del module.forward


@contextmanager
def cut_layers(model: PreTrainedModel, cut: Callable[[], None] | None) -> Iterator[None]:
    """Call cut before the layers behind the parts that _CUTS has, while entered; None: nothing."""
    if cut is None:
        yield
        return
    layers = decoder_layers(model)
    places = {-(-len(layers) // part) for part in _CUTS}
    own = {index: layers[index].forward for index in places if index < len(layers)}
    for index, forward in own.items():
        layers[index].forward = partial(_after, cut, forward)
    try:
        yield
    finally:
        for index, forward in own.items():
            layers[index].forward = forward


def _is_expanded(layer: nn.Module, tokens: int) -> bool:
    """Whether all GEMMs of a layer are cuBLAS's, with expanded weights, for so many tokens."""
    gemms = [module for module in layer.modules() if isinstance(module, NF4Linear | StackedWeight)]
    return bool(gemms) and all(isinstance(gemm, NF4Linear) and gemm.uses_copy(tokens) for gemm in gemms)


def _only_reads_rows(embedding: nn.Module) -> bool:
    return type(embedding) is nn.Embedding and embedding.max_norm is None


def _after(first: Callable[[], None], then: Callable[..., object], *args: object, **kwargs: object) -> object:
    first()
    return then(*args, **kwargs)
