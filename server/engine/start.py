"""From a checkpoint folder to a model runner that is ready."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import PreTrainedModel

from server.checkpoint.base import Progress
from server.checkpoint.classes import read_config
from server.checkpoint.dummy import dummy_model, dummy_shard
from server.checkpoint.images import without_images
from server.checkpoint.late import Economies
from server.checkpoint.loading import load_model
from server.checkpoint.sharding.sharded import ShardedModel, load_shard
from server.checkpoint.sharding.shards import Shard
from server.checkpoint.states import check_hybrid
from server.checkpoint.tokenizer_files import check_same_vocabulary
from server.config import EngineConfig
from server.engine.contention import barriers
from server.engine.planning import plan_start
from server.engine.runtime.exchange import Membership, join
from server.engine.runtime.limits import resolve_device, usable_threads
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.runner import ModelRunner
from server.engine.runtime.tp_workers import TPWorkers

logger = logging.getLogger(__name__)


def load_runner(
    folder: Path,
    config: EngineConfig,
    progress: Progress,
    membership: Membership | None = None,
    workers: TPWorkers | None = None,
) -> ModelRunner:
    """Load the checkpoint and make it ready to run.

    membership: of several processes that call this at the same time, each of which gets a shard of the model; the one of
    rank 0 has workers, which compute what it computes. Raises CheckpointError, UnsupportedModelError or
    EngineConfigError when that cannot succeed.
    """
    device, dtype = resolve_device(config)
    for chosen in (folder, *([Path(config.draft_model)] if config.draft_model else ())):
        check_hybrid(chosen, read_config(chosen), config)
    if device.type == "cpu":
        torch.set_num_threads(max(1, usable_threads(config) // (membership.count if membership else 1)))
    ranks, rank = (membership.count, membership.rank) if membership else (1, 0)
    # One rank computes the features of images for all.
    towers = config.load_format != "dummy" and without_images(folder, config) is None and rank == 0
    memory = plan_start(folder, config, device, towers, ranks)
    memory.check(folder, logs=rank == 0)
    config = memory.config
    with memory.explained(), barriers(sleep=device.type == "cpu"):
        model = _load(folder, config, device, dtype, progress, membership, towers)
        draft = _load_draft(folder, config, device, dtype, progress) if config.speculation == "draft" else None
        progress("preparing the model", 0.0)
        runner = build_runner(model, config, progress, workers, draft, memory.kept)
    runner.advice = memory.advice
    limits = runner.limits
    logger.info(
        "%s on %s in %s: up to %d tokens a sequence, %d in the KV cache (%d blocks of %d)",
        folder.name,
        device,
        str(dtype).removeprefix("torch."),
        limits.max_model_len,
        limits.num_blocks * config.block_size,
        limits.num_blocks,
        config.block_size,
    )
    return runner


def _load(
    folder: Path,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    membership: Membership | None,
    towers: bool,
) -> PreTrainedModel | ShardedModel:
    """The model in folder, or this rank's shard of it."""
    dummy, economies = config.load_format == "dummy", Economies.of(config, device.type)
    if membership is None and dummy:
        return dummy_model(folder, device, dtype, progress, seed=0, economies=economies)
    if membership is None:
        return load_model(folder, device, dtype, progress, towers, economies)
    shard = Shard(membership.rank, membership.count)
    if dummy:
        model = dummy_shard(folder, device, dtype, progress, shard)
    else:
        model = load_shard(folder, device, dtype, progress, shard, towers)
    progress("waiting for the other ranks", 0.0)
    join(membership, device)
    return model


def _load_draft(
    folder: Path, config: EngineConfig, device: torch.device, dtype: torch.dtype, progress: Progress
) -> PreTrainedModel:
    """The draft model of the model in folder. Raises CheckpointError, also where their tokenizers differ."""
    assert config.draft_model is not None
    chosen = Path(config.draft_model)
    if config.load_format == "dummy":
        return dummy_model(chosen, device, dtype, progress, seed=1)
    check_same_vocabulary(folder, chosen)
    return load_model(chosen, device, dtype, lambda stage, fraction: progress(f"draft model: {stage}", fraction))
