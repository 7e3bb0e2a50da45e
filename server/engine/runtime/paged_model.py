"""A transformers model over a paged KV cache: one forward pass of a batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from nf4_kernels.cuda.device_clock import DeviceClock
from server.engine.runtime.attention.base import AttentionBackend
from server.engine.runtime.attention.calls import attending
from server.engine.runtime.batch import Batch
from server.engine.runtime.layers.stateful.state_layers import StateLayers
from server.engine.runtime.model.decoder import without_head
from server.engine.runtime.model.image_inputs import image_inputs, positions_by_axis
from server.engine.runtime.model.image_tower import ImageTower
from server.engine.runtime.model.lora import adding
from server.engine.runtime.step_input import StepInput


class SmallSteps(Protocol):
    """Another way to compute some steps."""

    def takes(self, batch: Batch) -> bool:
        """Whether run() computes a batch."""
        ...

    def run(self, batch: Batch) -> torch.Tensor:
        """Result of PagedModel.run()."""
        ...


class PagedModel:
    """A model whose projections and attention are in their final form, and the backend that owns its cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        backend: AttentionBackend,
        block_size: int,
        clock: DeviceClock | None = None,
        adapter_slots: int = 0,
        tower: ImageTower | None = None,
        states: StateLayers | None = None,
    ) -> None:
        """clock: the device's, where it times the kernels. adapter_slots: LoRA adapters there is room for.

        tower: makes images' features, where the model's tower is loaded. states: the layers that have states, if any.
        """
        self.model = model
        self.device: torch.device = model.device
        self.backend = backend
        self.block_size = block_size
        self.clock = clock
        self.adapter_slots = adapter_slots
        self.tower = tower
        self.states = states
        self.small_steps: SmallSteps | None = None
        """Computes the steps that it takes in place of the model's class."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        size: int = self.model.config.get_text_config().vocab_size
        return size

    def with_features(self, given: StepInput) -> StepInput:
        """A step with the features of its images. Raises as ImageTower.features() does.

        They are computed before other ranks hear of the step: where that fails, no rank waits, and the request fails alone.
        """
        if given.images is None or self.tower is None:
            return given
        return replace(given, images=self.tower.with_features(given.images))

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [batch.sampled_rows, vocabulary] in float32; writes the batch's keys and values into the cache.

        Images in the batch must have their features, unless another rank has them. Call in inference mode.
        """
        if self.small_steps is not None and self.small_steps.takes(batch):
            return self.small_steps.run(batch)
        return self.run_class(batch)

    def run_class(self, batch: Batch) -> torch.Tensor:
        """run() by the model's class."""
        batch = batch.to(self.device)
        logits: torch.Tensor = self._call(self.model, batch, logits_to_keep=batch.sampled_rows).logits[0]
        return logits.float()

    def hidden_states(self, batch: Batch) -> torch.Tensor:
        """The final hidden states [batch.sampled_rows, hidden size] in float32, from which run() would compute logits."""
        batch = batch.to(self.device)
        hidden: torch.Tensor = self._call(without_head(self.model), batch).last_hidden_state[0]
        return hidden[batch.sampled_rows].float()

    def _call(self, module: Any, batch: Batch, **options: Any) -> Any:
        """Run the model, or its part without the head, on a batch."""
        inputs: AbstractContextManager[dict[str, Any]] = nullcontext({"input_ids": batch.ids.unsqueeze(0)})
        positions = batch.positions.unsqueeze(0)
        if batch.images is not None:
            inputs = image_inputs(self.model, batch.ids, batch.images)
            positions = positions_by_axis(batch, batch.images)
        with adding(batch, self.adapter_slots), inputs as given:
            self.backend.begin(batch)
            if self.states is not None:
                self.states.pool.begin(batch.spans, batch.num_single)
            with attending(self.backend):
                output = module(**given, position_ids=positions, use_cache=False, **options)
        if self.clock is not None:
            self.clock.collect()
        return output
