"""Makes a draft model ready: its projections and attention, a cache with the model's KV blocks, compiled layers, graphs."""

from __future__ import annotations

from transformers import PreTrainedModel

from nf4_kernels.device_clock import DeviceClock
from server.checkpoint.base import Progress
from server.config import EngineConfig
from server.engine.runtime.drafting import DraftModel
from server.engine.runtime.limits import ModelLimits, own_limit
from server.engine.runtime.model.cpu_linear import use_cpu_kernels
from server.engine.runtime.model.projections import replace_projections
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.cache import CacheSpec
from server.engine.runtime.preparation.compilation import compile_with_trials
from server.engine.runtime.preparation.step_costs import draft_times
from server.engine.runtime.sampling.inverse_cdf import use_device_sampling


class DraftPreparation:
    """What is known of a draft model before the number of KV blocks is."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig, clock: DeviceClock | None) -> None:
        """The model is changed in place. Raises UnsupportedModelError where its attention cannot be computed."""
        replace_projections(model)
        if model.device.type == "cpu":
            use_cpu_kernels(model)
        else:
            use_device_sampling(model.device, model.dtype, model.config.get_text_config().vocab_size)
        self._model = model
        self._config = config
        self._clock = clock
        self._spec = CacheSpec.of(model, config)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of its keys and values in one KV block."""
        return self._spec.bytes_per_block

    def finish(self, limits: ModelLimits, progress: Progress) -> tuple[DraftModel, dict[int, float]]:
        """The draft model of a model with these limits, and seconds of its steps by their sequences.

        Call in inference mode.
        """
        paged = PagedModel(self._model, self._spec.backend(limits.num_blocks), self._config.block_size, self._clock)
        if not self._config.enforce_eager and paged.backend.runs_compiled_layers:
            compile_with_trials(paged, progress)
        longest = own_limit(self._model.config.get_text_config()) or limits.max_model_len
        times = draft_times(paged, limits, None)
        return DraftModel(paged, limits.vocab_size, min(longest, limits.max_model_len)), times
