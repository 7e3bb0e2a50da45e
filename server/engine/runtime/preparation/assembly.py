"""Builds a runner: the model's projections and attention in their final form, its cache, layers and graphs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from nf4_kernels.cuda import load_error, start_clock
from server.checkpoint.base import Progress
from server.checkpoint.sharding.sharded import ShardedModel
from server.config import EngineConfig
from server.engine.runtime.attention.graph_backend import GraphBackend
from server.engine.runtime.exchange import least
from server.engine.runtime.layers.decoder import DecoderLayer
from server.engine.runtime.limits import EngineConfigError, ModelLimits, model_limits
from server.engine.runtime.memory import settle
from server.engine.runtime.model.class_forward import adapt_forward
from server.engine.runtime.model.cpu_linear import use_cpu_kernels
from server.engine.runtime.model.exchanged import exchange_outputs
from server.engine.runtime.model.expanded import expand_weights
from server.engine.runtime.model.host_embedding import read_from_host
from server.engine.runtime.model.image_tower import ImageTower, has_tower
from server.engine.runtime.model.latents import keep_latents
from server.engine.runtime.model.lora_registry import install_adapters
from server.engine.runtime.model.projections import replace_projections
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.cache import CacheSpec, cache_budget
from server.engine.runtime.preparation.drafting import DraftPreparation
from server.engine.runtime.preparation.expansion import expansion_budget
from server.engine.runtime.preparation.graph_capture import (
    capture_decode,
    capture_mixed,
    capture_verify,
    verify_sizes,
)
from server.engine.runtime.preparation.own_forward import check_own_forward
from server.engine.runtime.preparation.states import keep_in_16_bits, make_states
from server.engine.runtime.preparation.step_costs import measure_steps
from server.engine.runtime.preparation.tuning import choose_launches
from server.engine.runtime.preparation.written_layers import write_layers
from server.engine.runtime.runner import ModelRunner, StepGraphs
from server.engine.runtime.sampling.ops import use_kernels
from server.engine.runtime.tp_workers import TPWorkers
from server.engine.runtime.trials import summary

logger = logging.getLogger(__name__)


def build_runner(
    loaded: PreTrainedModel | ShardedModel,
    config: EngineConfig,
    progress: Progress = lambda *_: None,
    workers: TPWorkers | None = None,
    draft: PreTrainedModel | None = None,
    kept_bytes: int = 0,
) -> ModelRunner:
    """A runner of what was loaded, which is changed in place and is the runner's from here on.

    The ranks of a divided model must build their runners at the same time; workers: of rank 0. draft:
    the draft model, on the same device, where the configuration has one. kept_bytes as expansion_budget() has them.

    Layers are written ones where they can be, and on CUDA steps are captured as graphs, unless engine.enforce_eager leaves
    that out. Raises EngineConfigError, UnsupportedModelError, or CheckpointError for an adapter that cannot be served.
    """
    sharded = loaded if isinstance(loaded, ShardedModel) else None
    model: PreTrainedModel = sharded.model if sharded else loaded
    device = model.device
    if config.batch_invariant and (config.enforce_eager or device.type != "cuda"):
        raise EngineConfigError("engine.batch_invariant needs CUDA, and engine.enforce_eager off")
    if device.type == "cuda":
        settle(device)  # what loading has taken for a while
    read_from_host(model)
    keep_in_16_bits(model)
    replace_projections(model)
    choose_launches(model, config, progress)
    expand_weights(model, least(expansion_budget(device, config, kept_bytes)))
    if device.type == "cpu":
        use_cpu_kernels(model)
    else:
        use_kernels(device, model.dtype, model.config.get_text_config().vocab_size)
    adapters = install_adapters(model, config, sharded.parts if sharded else None)
    if sharded:
        exchange_outputs(model, sharded.parts, sharded.shard, sharded.norms)
    adapt_forward(model)
    keep_latents(model)
    spec = CacheSpec.of(model, config)
    states = make_states(model, spec.bytes_per_block, config)
    if states is not None:
        config = config.model_copy(update={"max_num_seqs": states.pool.max_num_seqs})
    tower = ImageTower(model) if has_tower(model) else None
    clock = start_clock(device) if device.type == "cuda" and load_error() is None else None

    def paged_with(num_blocks: int) -> PagedModel:
        slots = adapters.slots if adapters else 0
        return PagedModel(model, spec.backend(num_blocks), config.block_size, clock, slots, tower, states)

    drafting = None if draft is None else DraftPreparation(draft, config, clock)
    budget = least(cache_budget(model, paged_with, spec.bytes_per_block, config))
    limits = model_limits(model, spec.bytes_per_block + (drafting.bytes_per_block if drafting else 0), config, budget)
    with torch.inference_mode():
        check_own_forward(paged_with, spec, limits)
    paged = paged_with(limits.num_blocks)
    with torch.inference_mode():
        layers = [] if config.enforce_eager else write_layers(paged, spec.options)
        graphs = StepGraphs() if config.enforce_eager else _capture_steps(paged, limits, config, progress, layers)
        draft_model, draft_times = drafting.finish(limits, graphs, progress) if drafting else (None, None)
        costs = measure_steps(paged, limits, graphs, draft_times) if config.speculation != "off" else None
    if not config.batch_invariant:
        paged.backend.load_long_chunks()
    return ModelRunner(paged, limits, adapters, graphs, costs, workers, draft_model)


def _capture_steps(
    paged: PagedModel, limits: ModelLimits, config: EngineConfig, progress: Progress, layers: Sequence[DecoderLayer]
) -> StepGraphs:
    """Capture paged's steps, as far as its backend can. Raises EngineConfigError.

    layers: its written layers; empty: it has none.
    """
    backend = paged.backend
    if not isinstance(backend, GraphBackend):
        if config.batch_invariant:
            raise EngineConfigError(
                "engine.batch_invariant needs CUDA graphs, and attention has them with our own kernels only; a warning"
                " in the log says why these cannot be used"
            )
        return StepGraphs()
    try:
        decode = capture_decode(paged, backend, limits, config, progress, layers)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as e:
        # transformers' own code does what cannot be captured, such as copies from the host, or waits for the device.
        if config.batch_invariant or "captur" not in str(e):
            raise
        logger.warning("steps run without CUDA graphs, which is slow: %s", summary(e))
        return StepGraphs()
    sizes = verify_sizes(config)
    drafted = bool(sizes) and paged.states is None
    verify = capture_verify(paged, backend, limits, sizes, decode, progress) if drafted else None
    mixed = None if config.batch_invariant else capture_mixed(paged, backend, limits, config, decode, progress)
    return StepGraphs(decode, mixed, verify, config.batch_invariant)
