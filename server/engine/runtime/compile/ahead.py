"""A decoder layer compiled ahead of its calls, into a function without guards that later starts can read from disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from server.engine.runtime.compile.artifacts import artifact_path, load_artifact, store_artifact
from server.engine.runtime.compile.compiled_layer import Signature
from server.engine.runtime.compile.signatures import arguments_of, configurations_of, named_tensors


def kept_function(layer: nn.Module, kind: object, compiled: Callable[[], Any]) -> Callable[..., Any]:
    """The function of a kind of layer that an earlier start has kept, else that of compiled(), which is kept.

    kind: as of kept_path(). compiled: gives what compile_ahead() gives.
    """
    path = kept_path(layer, kind)
    function = load_artifact(path, layer)
    if function is None:
        ahead = compiled()
        store_artifact(path, ahead, layer, device_of(layer))
        function = ahead.fn
    assert function is not None
    return function


def kept_path(layer: nn.Module, kind: object) -> Path:
    """Where a function is kept. kind says everything that decides what its code is, but for what is known of any layer.

    That is the versions of code and packages, the model's configuration, and the device.
    """
    return artifact_path(device_of(layer), kind, configurations_of(layer))


def compile_ahead(layer: nn.Module, signature: Signature, examples: list[torch.Tensor]) -> Any:
    """What torch stores of a layer compiled for calls with such tensors in the signature's places.

    Its fn is a function of (the signature's tensors..., the layer's tensors...) without guards.
    """
    names = list(named_tensors(layer))
    count = len(signature.tensors)

    def call(*tensors: torch.Tensor) -> Any:
        args, kwargs = arguments_of(signature, tensors[:count])
        output = functional_call(layer, dict(zip(names, tensors[count:], strict=True)), args, kwargs)
        shared = signature.shared
        return output if shared is None else (output, shared.outputs(kwargs[shared.argument]))

    # Ahead-of-time compilation is off by default before torch 2.13, and cannot start over with floats as tensors. Sizes
    # vary where the examples are marked, not because the code has been compiled for another size before.
    settings = {
        "enable_aot_compile": True,
        "specialize_float": True,
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": True,
    }
    with torch._dynamo.config.patch(settings), _without_sources():
        compiled: Any = torch.compile(call, fullgraph=True, options={"guard_filter_fn": _without_guards})
        ahead = compiled.aot_compile(((*examples, *own_tensors(layer)), {}))
    ahead.disable_guard_check()
    return ahead


def _without_guards(guards: Sequence[Any]) -> list[bool]:
    """Leave out all guards: nothing would ask them, and to make them takes as long as a quarter of the compilation."""
    return [False] * len(guards)


@contextmanager
def _without_sources() -> Iterator[None]:
    """While entered, torch does not look up the source text of what it traces, which takes it a quarter of a second."""
    from torch._dynamo.package import SourceInfo

    kept: Any = SourceInfo
    add = kept.add_code
    kept.add_code = lambda *_: None
    try:
        yield
    finally:
        kept.add_code = add


def device_of(layer: nn.Module) -> torch.device:
    """Where a layer's parameters are."""
    return next(layer.parameters()).device


def own_tensors(layer: nn.Module) -> list[torch.Tensor]:
    """The tensors of a layer that its compiled function takes behind the signature's."""
    return list(named_tensors(layer).values())
