"""Small steps on CPU as one C call: the calls that all compiled layers make are recorded once for a number of tokens.

A layer is a dozen calls of C functions, with some hundred microseconds of Python and of torch's dispatch between them. For
few tokens that takes as long as the GEMMs. Like a CUDA graph a recording has buffers of its own, which stay where they are;
what changes from step to step is copied into them or, for attention, read from the backend's description of the step.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from server.engine.runtime.attention.calls import is_attending
from server.engine.runtime.attention.paged_cpu import PagedCpuBackend
from server.engine.runtime.compile.compiled_layer import CompiledLayer
from server.engine.runtime.graphs.recording import Recording, RecordingError
from server.engine.runtime.graphs.shown_layers import ShownLayers
from server.engine.runtime.model.cpu_linear import prepared_linear
from server.engine.runtime.native import load_native

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("recorded.cpp")
MOST_TOKENS = 8
"""Larger steps are launched as before: what is between their GEMMs is a small part of them."""


class RecordedLayers:
    """Replays steps of few tokens, recorded when they first come; it takes the place of the compiled layers' forwards."""

    def __init__(self, model_layers: nn.ModuleList, backend: PagedCpuBackend) -> None:
        """Raises RecordingError, with the model's layers as they were, where that cannot be done."""
        library = load_native(SOURCE)
        if isinstance(library, str):
            raise RecordingError(library)
        library.run_calls.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        library.run_calls.restype = None
        self._run = library.run_calls
        layers = [layer for layer in model_layers if not isinstance(layer, nn.Identity)]
        self._layers = layers
        self._model_layers = model_layers
        self._backend = backend
        self._compiled: list[CompiledLayer] = []
        for layer in layers:
            forward = layer.forward
            if not isinstance(forward, CompiledLayer) or not forward.is_plain:
                raise RecordingError(f"{type(layer).__name__} gets or gives more than tensors")
            self._compiled.append(forward)
        self._recordings: dict[int, Recording] = {}
        self._recording: Recording | None = None
        self._replayed = False
        self._first_alone = False
        self._shared: list[int] = []
        self.refusal: str | None = None
        """Why the layers could not be recorded, once that has been tried."""
        self._modules: list[dict[str, Any]] = []
        for index, layer in enumerate(layers):
            layer.forward = self._forward_of(index)
        ShownLayers.put(model_layers, self.shown)

    def undo(self) -> None:
        """Put the compiled layers back."""
        for layer, compiled in zip(self._layers, self._compiled, strict=True):
            layer.forward = compiled
        ShownLayers.take(self._model_layers)

    def recording(self, tokens: int) -> Recording | None:
        """The recording for a number of tokens, where there is one."""
        return self._recordings.get(tokens)

    @contextmanager
    def replayed_by(self, replay: Callable[[list[torch.Tensor]], torch.Tensor]) -> Iterator[None]:
        """While entered, the first layer, which stands for all, gives what replay() gives for the tensors it gets."""
        first, compiled = self._layers[0], self._compiled[0]
        before = first.forward
        first.forward = lambda *args, **kwargs: replay(compiled.pick(args, kwargs))
        try:
            yield
        finally:
            first.forward = before

    def shown(self, layers: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """What of its layers the model goes through now: in a step that is replayed, the first one stands for all."""
        backend = self._backend
        self._first_alone = (
            is_attending(backend) and not backend.sees_later_tokens and backend.num_tokens in self._recordings
        )
        return self._layers[:1] if self._first_alone else layers

    def _forward_of(self, index: int) -> Callable[..., Any]:
        compiled = self._compiled[index]

        def first(*args: Any, **kwargs: Any) -> Any:
            return self._begin(compiled.pick(args, kwargs))

        def later(*args: Any, **kwargs: Any) -> Any:
            if self._replayed:
                return compiled.pick(args, kwargs)[0]
            if self._recording is None:
                return compiled(*args, **kwargs)
            return self._record_or_run(index, compiled.pick(args, kwargs))

        return later if index else first

    def _begin(self, tensors: list[torch.Tensor]) -> Any:
        """The first layer of a step; with a recording of as many tokens, all layers."""
        tokens = tensors[0].shape[-2]
        self._recording, self._replayed = None, False
        if tokens > MOST_TOKENS or self._backend.sees_later_tokens:
            return self._compiled[0].run(tensors)
        recording = self._recordings.get(tokens)
        if recording is not None:
            self._replayed = True
            return recording.replay(tensors)
        if self._first_alone:
            raise RuntimeError(f"{self._backend.num_tokens} tokens were to be replayed, and the layers get {tokens}")
        self._shared = [tensor.data_ptr() for tensor in tensors[1:]]
        self._recording = Recording(tensors, self._run)
        self._recording.output = tensors[0]
        return self._record_or_run(0, tensors)

    def _record_or_run(self, index: int, tensors: list[torch.Tensor]) -> Any:
        """Run a layer and record it; where that fails, the layers are compiled layers again."""
        try:
            return self._record(index, tensors)
        except RecordingError as e:
            self.refusal = str(e)
            self._recording = None
            self.undo()
            self._backend.go_to(index)
            return self._compiled[index].run(tensors)

    def _record(self, index: int, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Run a layer and record its calls."""
        recording, compiled = self._recording, self._compiled[index]
        assert recording is not None
        if [tensor.data_ptr() for tensor in tensors[1:]] != self._shared:
            raise RecordingError("layers get different tensors beside the hidden states")
        if tensors[0].data_ptr() != recording.output.data_ptr():
            raise RecordingError("a layer does not get what the one before it gives")
        hidden = recording.inputs[0] if index == 0 else tensors[0]
        inputs = [hidden, *recording.inputs[1:]]
        if index >= len(self._modules):
            self._modules.append(_generated_module(lambda: compiled.run(inputs)))
        recording.begin_layer(index)
        with _recorded_calls(self._modules[index], recording, self._backend, index):
            output = compiled.run(inputs)
        if not isinstance(output, torch.Tensor):
            raise RecordingError(f"a layer gives a {type(output).__name__}")
        recording.output = output
        if index == len(self._layers) - 1:
            recording.end(output)
            self._recordings[output.shape[-2]] = recording
            self._recording = None
        return output


def _generated_module(run: Callable[[], object]) -> dict[str, Any]:
    """The names of the module that inductor has written for the one compiled function that run() calls."""
    found: dict[int, dict[str, Any]] = {}

    def watch(frame: FrameType, event: str, _: object) -> None:
        names = frame.f_globals
        if event == "call" and frame.f_code.co_name == "call" and "empty_strided_cpu" in names:
            found[id(names)] = names

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(before)
    if len(found) != 1:
        raise RecordingError(f"a layer's code is in {len(found)} modules")
    return next(iter(found.values()))


@contextmanager
def _recorded_calls(
    names: dict[str, Any], recording: Recording, backend: PagedCpuBackend, layer: int
) -> Iterator[None]:
    """Record the calls that a generated module makes while entered; a call that is not known here raises RecordingError."""

    def linear(x: torch.Tensor, handle: torch.Tensor, out_features: int) -> torch.Tensor:
        prepared = prepared_linear(handle)
        out = recording.empty(*_dense((*x.shape[:-1], out_features)), x.dtype)
        recording.add(*prepared.recorded(x, out), prepared)
        return out

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if any(tensor.dtype is not torch.float32 for tensor in (query, key, value)):
            raise RecordingError(f"attention is in {query.dtype}")
        shape = (query.shape[0], query.shape[1], backend.value_dim(layer))
        out = recording.empty(*_dense(shape), query.dtype)
        function, arguments, call = backend.recorded(layer, query, key, value, out)
        recording.add(function, arguments, call)
        return out

    def op(function: Callable[..., torch.Tensor]) -> SimpleNamespace:
        return SimpleNamespace(default=function)

    ops = _Known(
        "torch.ops", nf4_server_cpu=_Known("ops", linear=op(linear)), nf4_server=_Known("ops", attend=op(attend))
    )
    dtypes = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    stand_ins: dict[str, Any] = {"torch": _Known("torch", ops=ops, **dtypes), "empty_strided_cpu": recording.empty}
    for name, value in names.items():
        if name.startswith("cpp_fused"):
            stand_ins[name] = _kernel(value, recording)
        elif name in ("aten", "inductor_ops", "_quantized", "extern_kernels", "alloc_from_pool"):
            stand_ins[name] = _Known(name)
    before = {name: names[name] for name in stand_ins}
    names.update(stand_ins)
    try:
        yield
    finally:
        names.update(before)


class _Known(SimpleNamespace):
    """A namespace of what can be recorded."""

    def __init__(self, name: str, **known: Any) -> None:
        super().__init__(**known)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        raise RecordingError(f"a layer uses {self._name}.{name}")


def _kernel(kernel: Any, recording: Recording) -> Callable[..., None]:
    """Records calls of a C++ kernel of inductor's, which takes tensors and integers."""
    function = _address(kernel.__self__.__file__)

    def call(*arguments: Any) -> None:
        numbers = []
        for argument in arguments:
            if not isinstance(argument, torch.Tensor | int):
                raise RecordingError(f"a kernel takes a {type(argument).__name__}")
            numbers.append(argument.data_ptr() if isinstance(argument, torch.Tensor) else argument)
        recording.add(function, tuple(numbers), *arguments)

    return call


@cache
def _address(library: str) -> int:
    """The C function in a library that inductor has compiled."""
    function = ctypes.cast(ctypes.CDLL(library).kernel, ctypes.c_void_p).value
    assert function is not None
    return function


def _dense(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape and its contiguous strides."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return shape, tuple(strides)
