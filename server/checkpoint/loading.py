"""Load a checked checkpoint onto a device as a transformers model with bitsandbytes Linear4bit layers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, core_model_loading
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from server.checkpoint.base import CheckpointError, Progress
from server.checkpoint.inspection import CheckpointInfo, inspect_checkpoint

logger = logging.getLogger(__name__)


def load_model(folder: Path, device: torch.device, dtype: torch.dtype, progress: Progress) -> PreTrainedModel:
    """The model in folder, in eval mode on device: NF4 linear layers, everything else in dtype.

    A 16 or 32 bit checkpoint is quantized to NF4 (blocks of 64, double quantization) while loading, one tensor at a
    time. Raises CheckpointError for a checkpoint that is damaged, incomplete, unsupported or too large for the memory.
    """
    info = inspect_checkpoint(folder)
    check_supported(info)
    check_memory(info, device, dtype)
    options: dict[str, Any] = {}
    if info.quantization == "none":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    try:
        with _reported(progress, "loading weights" if info.quantization == "nf4" else "loading and quantizing weights"):
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                device_map={"": device},
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
    except torch.OutOfMemoryError as e:
        raise CheckpointError(f"{folder}: out of memory on {device} while loading") from e
    except (OSError, ValueError, RuntimeError, KeyError, AssertionError, ImportError) as e:
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise CheckpointError(f"{folder}: cannot be loaded: {reason}") from e
    _check_complete(folder, report)
    _set_dtype(model, dtype)
    return model.eval().requires_grad_(False)


def _set_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Compute in dtype throughout: transformers leaves a quantized checkpoint's other weights in their stored dtype."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and not isinstance(parameter, Params4bit):
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.compute_dtype = dtype
            module.compute_type_is_set = True
    model.config.dtype = dtype


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken on device, in bytes; on CPU also within the control group's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo", encoding="ascii") as file:
        free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    try:
        with (
            open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit,
            open("/sys/fs/cgroup/memory.current", encoding="ascii") as used,
        ):
            free = min(free, int(limit.read()) - int(used.read()))
    except (OSError, ValueError):
        pass  # no control group, or no limit ("max")
    return free


def check_supported(info: CheckpointInfo) -> None:
    """Raise CheckpointError for what is no causal language model."""
    if info.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise CheckpointError(f"{info.folder}: {info.architecture} ({info.model_type}) is not a causal language model")


def check_memory(info: CheckpointInfo, device: torch.device, dtype: torch.dtype, shards: int = 1) -> None:
    """Raise CheckpointError where the weights, or one of so many shards of them, do not fit into the device's memory."""
    needed = info.loaded_bytes(dtype.itemsize) / shards
    free = available_bytes(device)
    if needed > free:
        raise CheckpointError(
            f"{info.folder}: too large: its weights take {needed / 2**30:.1f} GiB in NF4"
            f"{f' on each of {shards} devices' if shards > 1 else ''}, {free / 2**30:.1f} GiB are free on {device};"
            " engine.tensor_parallel_size divides them among several GPUs"
        )


def _check_complete(folder: Path, report: dict[str, Any]) -> None:
    """transformers fills what a checkpoint lacks with random numbers; a server must not answer from those."""
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        found = list(report.get(what) or [])
        if found:
            raise CheckpointError(f"{folder}: damaged: {what.replace('_', ' ')}: {found[0]} ({len(found)} in all)")
    if unexpected := report.get("unexpected_keys"):
        logger.warning(
            "%s: %d tensors are not part of the model, %s first", folder, len(unexpected), next(iter(unexpected))
        )


@contextmanager
def _reported(progress: Progress, stage: str) -> Iterator[None]:
    """While entered, transformers' loading bar calls progress instead of drawing itself."""

    def report(items: Iterable[Any], **_: Any) -> Iterator[Any]:
        listed = list(items)
        step = max(1, len(listed) // 100)
        for done, item in enumerate(listed):
            if done % step == 0:
                progress(stage, done / len(listed))
            yield item
        progress(stage, 1.0)

    progress_bar = core_model_loading.tqdm
    core_model_loading.tqdm = report
    try:
        yield
    finally:
        core_model_loading.tqdm = progress_bar
