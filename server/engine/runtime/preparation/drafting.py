"""Makes a draft model ready: its projections and attention, a cache with the model's KV blocks, its layers, graphs."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from nf4_kernels.cuda.device_clock import DeviceClock
from server.checkpoint.base import Progress
from server.config import EngineConfig
from server.engine.runtime.attention.graph_backend import GraphBackend
from server.engine.runtime.graphs.graph_set import DRAFT_SIZES, GraphSet
from server.engine.runtime.graphs.pool import GraphPool
from server.engine.runtime.layers.decoder import DecoderLayer
from server.engine.runtime.limits import ModelLimits, own_limit, sequence_limit
from server.engine.runtime.model.class_forward import adapt_forward
from server.engine.runtime.model.cpu_linear import use_cpu_kernels
from server.engine.runtime.model.latents import keep_latents
from server.engine.runtime.model.projections import replace_projections
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.cache import CacheSpec
from server.engine.runtime.preparation.graph_capture import capture_verify, decode_forms
from server.engine.runtime.preparation.step_costs import draft_times
from server.engine.runtime.preparation.written_layers import write_layers
from server.engine.runtime.runner import StepGraphs
from server.engine.runtime.sampling.ops import use_kernels
from server.engine.runtime.speculation.draft_model import DraftGraphs, DraftModel


class DraftPreparation:
    """Draft model of which the number of KV blocks is not known yet."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig, clock: DeviceClock | None) -> None:
        """The model is changed in place. Raises UnsupportedModelError where its attention cannot be computed."""
        replace_projections(model)
        if model.device.type == "cpu":
            use_cpu_kernels(model)
        else:
            use_kernels(model.device, model.dtype, model.config.get_text_config().vocab_size)
        adapt_forward(model)
        keep_latents(model)
        self._model = model
        self._config = config
        self._clock = clock
        self._spec = CacheSpec.of(model, config)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of its keys and values in one KV block."""
        return self._spec.bytes_per_block

    def finish(
        self, limits: ModelLimits, graphs: StepGraphs, progress: Progress
    ) -> tuple[DraftModel, dict[int, float]]:
        """The draft model of a model with these limits and graphs, and seconds of its steps by their sequences.

        Call in inference mode.
        """
        config, model = self._config, self._model
        paged = PagedModel(model, self._spec.backend(limits.num_blocks), config.block_size, self._clock)
        layers = [] if config.enforce_eager else write_layers(paged, self._spec.options)
        captured: DraftGraphs | None = None
        if graphs.decode is not None and isinstance(paged.backend, GraphBackend):
            captured = self._capture(paged, paged.backend, limits, graphs.decode.pool, progress, layers)
        longest = own_limit(model.config.get_text_config()) or limits.max_model_len
        times = draft_times(paged, limits, None if captured is None else captured.decode)
        return DraftModel(paged, limits.vocab_size, min(longest, limits.max_model_len), captured), times

    def _capture(
        self,
        paged: PagedModel,
        backend: GraphBackend,
        limits: ModelLimits,
        pool: GraphPool,
        progress: Progress,
        layers: Sequence[DecoderLayer],
    ) -> DraftGraphs:
        """Capture steps of as many sequences as may have draft tokens together."""
        # The device's copy of the block tables has a row for each running sequence.
        rows = sequence_limit(self._config, paged.device, limits.num_blocks * self._config.block_size)
        sizes = [1, *(size for size in DRAFT_SIZES if size < max(DRAFT_SIZES))]
        backend.set_up_graphs(
            limits.max_model_len, max(rows, *DRAFT_SIZES), True, decode_forms(layers, sizes, paged.dtype)
        )
        decode = GraphSet(paged.model, backend, paged.block_size, paged.clock, pool=pool, waited_for=True)
        decode.capture(sizes, progress)
        verify = capture_verify(paged, backend, limits, DRAFT_SIZES, decode, progress)
        return DraftGraphs(decode, verify)
