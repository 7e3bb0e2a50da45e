"""Number of GPUs of engine.tensor_parallel_size auto: the fewest that hold the model, of the sizes that divide it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from server.checkpoint.base import CheckpointError
from server.checkpoint.classes import is_left_out, loading_of
from server.checkpoint.images import without_images
from server.checkpoint.inspection import inspect_checkpoint
from server.checkpoint.late import Economies
from server.checkpoint.loading import whole_bytes
from server.checkpoint.lora import check_divisible, read_adapter
from server.checkpoint.sharding.plan import plan_shard
from server.checkpoint.sharding.shards import Shard, possible_counts
from server.checkpoint.sharding.stored import largest_blocks
from server.config import EngineConfig
from server.engine.runtime.limits import EngineConfigError

logger = logging.getLogger(__name__)

# With auto, a GPU is to hold its part of the weights in this share of its memory. The rest is for steps and the cache.
AUTO_SHARE = 0.7


def check_config(config: EngineConfig, count: int) -> None:
    """Raise EngineConfigError for what the configuration asks for and several ranks do not do."""
    if config.batch_invariant:
        raise EngineConfigError(
            f"engine.batch_invariant does not work with engine.tensor_parallel_size {count}:"
            " NCCL does not promise in which order it adds"
        )
    asked = {
        "quantize_output_layer nf4": config.quantize_output_layer == "nf4",
        "quantize_skipped": config.quantize_skipped,
        "embedding_device cpu": config.embedding_device == "cpu",
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise EngineConfigError(f"engine.{name} does not work with engine.tensor_parallel_size {count}")


def fewest(
    folder: Path, config: EngineConfig, device: torch.device, dtype: torch.dtype, free: int, devices: int
) -> int:
    """The fewest of `devices` GPUs, each with free bytes, that hold the model's weights and leave room for a cache.

    Where no number of them does, the largest that divides the model. Where none above one can be, one, if it holds the
    weights at all; else raises CheckpointError with the reason.
    """
    info = inspect_checkpoint(folder)
    chosen, towers = loading_of(info), without_images(folder, config) is None
    if config.speculation == "draft" and config.draft_model is not None:
        # Every GPU has the draft model whole.
        draft = inspect_checkpoint(Path(config.draft_model))
        free -= whole_bytes(draft, device, dtype, loading_of(draft), towers=False)
    needed = whole_bytes(info, device, dtype, chosen, towers, Economies.of(config, device.type))
    if needed <= free * AUTO_SHARE or devices == 1:
        return 1
    blocksize, _ = largest_blocks(info.without(lambda name: is_left_out(name, chosen.config)), chosen.config)
    possible = [count for count in possible_counts(chosen.config, blocksize) if 1 < count <= devices]
    adapters = _refused_adapters(config, dtype)
    largest, reasons = None, []
    # Where no size can be, it is said why the number of all GPUs is none.
    for count in possible or [devices]:
        try:
            check_config(config, count)
            # Rank 0 has the image tower beside its part.
            plan = plan_shard(folder, device, dtype, Shard(0, count), towers)
            if adapters is not None:
                raise adapters
        except (CheckpointError, EngineConfigError) as e:
            reasons.append(str(e).removeprefix(f"{folder}: "))
            continue
        if plan.num_bytes <= free * AUTO_SHARE:
            return count
        largest = count
    if largest is not None:
        return largest
    if needed > free:
        raise CheckpointError(
            f"{folder}: engine.tensor_parallel_size auto: its weights take {needed / 2**30:.1f} GiB in NF4,"
            f" {free / 2**30:.1f} GiB are free on {device}, and several GPUs cannot have them: {reasons[0]}"
        )
    logger.warning("engine.tensor_parallel_size auto: one GPU, which leaves little for the KV cache: %s", reasons[0])
    return 1


def _refused_adapters(config: EngineConfig, dtype: torch.dtype) -> CheckpointError | None:
    """Why several GPUs do not serve the adapters that are loaded at the start; None where they do."""
    try:
        for module in config.lora_modules:
            check_divisible(module.name, read_adapter(module.path, dtype))
    except CheckpointError as e:
        return e
    return None
