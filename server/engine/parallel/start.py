"""From a checkpoint to a runner whose model one process computes, or several together."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import torch

from server.checkpoint.base import Progress
from server.checkpoint.classes import loading_of, read_config
from server.checkpoint.experts.tensors import BLOCKSIZE
from server.checkpoint.inspection import inspect_checkpoint
from server.checkpoint.loading import available_bytes
from server.checkpoint.sharding.plan import divided
from server.checkpoint.sharding.shards import check_count
from server.checkpoint.states import check_hybrid
from server.config import EngineConfig
from server.engine.parallel.auto import check_config, fewest
from server.engine.parallel.processes import kill, start_processes
from server.engine.parallel.workers import Failed, Workers, start_workers
from server.engine.runtime.exchange import EXCHANGE_S, set_timeout
from server.engine.runtime.limits import EngineConfigError, resolve_device
from server.engine.runtime.runner import ModelRunner
from server.engine.start import load_runner

logger = logging.getLogger(__name__)


def load_ranks(
    folder: Path,
    config: EngineConfig,
    progress: Progress,
    failed: Failed,
    logging_options: list[str],
    processes: list[subprocess.Popen[bytes]] | None = None,
) -> tuple[ModelRunner, Workers | None]:
    """The runner of engine.tensor_parallel_size ranks, of which this process is the first, and the workers of the others.

    failed as of start_workers(), logging_options as of start_processes(). processes: those of processes_of(), which
    are killed where they cannot be used. Raises as load_runner() does.
    """
    given = processes or []
    try:
        device, dtype = resolve_device(config)
        count = config.tensor_parallel_size
        if count == "auto":
            count = _fewest(folder, config, device, dtype)
        if count == 1:
            return load_runner(folder, config, progress), None
        _check(folder, config, count, device)
        given = given or start_processes(count, device.type == "cuda", logging_options)
    except BaseException:
        kill(given)
        raise
    workers = start_workers(folder, config, given, device.type, failed)
    try:
        runner = load_runner(folder, config, progress, workers.membership, workers)
        progress("waiting for the other ranks", 1.0)
        workers.wait_ready()
        set_timeout(EXCHANGE_S)
        if runner.adapters is not None:
            runner.adapters.on_write = workers.write_adapter
    except BaseException:
        workers.end()
        raise
    return runner, workers


def _check(folder: Path, config: EngineConfig, count: int, device: torch.device) -> None:
    """Raise EngineConfigError or CheckpointError where count ranks cannot compute the model."""
    check_config(config, count)
    devices = torch.cuda.device_count() if device.type == "cuda" else count
    if count > devices:
        raise EngineConfigError(f"engine.tensor_parallel_size is {count}, and there are {devices} GPUs")
    check_hybrid(folder, read_config(folder), config)
    # Before the workers start, so that the message comes at once and from one process.
    if config.load_format == "dummy":
        check_count(read_config(folder), BLOCKSIZE, count, str(folder))
    else:
        info = inspect_checkpoint(folder)
        divided(info, loading_of(info), count)


def _fewest(folder: Path, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> int:
    """The fewest GPUs that hold the model and leave room for a cache; 1 on CPU, and where the folder has no weights."""
    if device.type != "cuda" or config.load_format == "dummy":
        return 1
    found = fewest(folder, config, device, dtype, available_bytes(device), torch.cuda.device_count())
    logger.info("engine.tensor_parallel_size auto: %d of %d GPUs", found, torch.cuda.device_count())
    return found
