"""Recorded small steps on CPU without the model's class: what it does around its layers, as a list of operations.

Going through a class of transformers' takes some 700 us for 20 operations. They are traced once for a number of tokens; the
layers between them are one operation, which replays their recording.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel

from server.engine.runtime.attention.calls import attending
from server.engine.runtime.attention.paged_cpu import PagedCpuBackend
from server.engine.runtime.batch import Batch
from server.engine.runtime.graphs.recorded import RecordedLayers
from server.engine.runtime.graphs.recording import Recording, RecordingError

# A traced step names its recording by number, which lives as long as its RecordedLayers.
_recordings: WeakValueDictionary[int, Recording] = WeakValueDictionary()
_numbers = itertools.count()


def _replay(inputs: list[torch.Tensor], recording: int) -> torch.Tensor:
    return _recordings[recording].replay(inputs)


_library = torch.library.Library("nf4_server_recorded", "DEF")
_library.define("replay(Tensor[] inputs, int recording) -> Tensor")
_library.impl("replay", _replay, "CPU")


Step = Callable[..., torch.Tensor]


class TracedSteps:
    """Computes steps for whose number of tokens trace() has been called, and all of whose logits are wanted."""

    def __init__(self, model: PreTrainedModel, layers: RecordedLayers, backend: PagedCpuBackend) -> None:
        self._model = model
        self._layers = layers
        self._backend = backend
        self._steps: dict[int, Step] = {}

    def trace(self, batch: Batch) -> None:
        """Trace a step that takes() would take, and whose layers have been recorded for its number of tokens.

        Raises RecordingError, or what tracing raises where the model's class asks for a tensor's values.
        """
        recording = self._layers.recording(batch.num_tokens)
        if recording is None:
            raise RecordingError(f"steps of {batch.num_tokens} tokens are not recorded")
        number = next(_numbers)
        _recordings[number] = recording

        def replay(tensors: list[torch.Tensor]) -> torch.Tensor:
            out: torch.Tensor = torch.ops.nf4_server_recorded.replay(tensors, number)
            return out

        def step(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            found: Any = self._model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=rows)
            logits: torch.Tensor = found.logits[0].float()
            return logits

        self._backend.begin(batch)
        with attending(self._backend), self._layers.replayed_by(replay):
            traced = make_fx(step)(*_inputs(batch))
        traced.graph.eliminate_dead_code()
        traced.recompile()
        # The method, not the module, whose call would look for hooks.
        self._steps[batch.num_tokens] = traced.forward

    def forget(self, tokens: int) -> None:
        """Undo trace() for a number of tokens."""
        self._steps.pop(tokens, None)

    def takes(self, batch: Batch) -> bool:
        """Whether run() computes a batch; none that has adapters, of which those of the output layer are not traced."""
        tokens = batch.num_tokens
        known = tokens in self._steps and batch.sampled_rows.shape[0] == tokens
        return known and batch.images is None and not batch.spans.adapted

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [tokens, vocabulary] in float32 of a batch that takes() has taken; writes the cache."""
        self._backend.begin(batch)
        return self._steps[batch.num_tokens](*_inputs(batch))


def _inputs(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch.ids.unsqueeze(0), batch.positions.unsqueeze(0), batch.sampled_rows
