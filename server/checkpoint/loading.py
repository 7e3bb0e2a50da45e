"""Load a checked checkpoint onto a device as a transformers model with bitsandbytes Linear4bit layers."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from server.checkpoint.base import CheckpointError, Progress
from server.checkpoint.classes import Loading, add_image_outputs, is_left_out, keep_within_tables, loading_of
from server.checkpoint.diagnosis import check_finite, end_tokens, first_line, linear_layers
from server.checkpoint.embedding import MODULES
from server.checkpoint.experts.loading import ExpertsLoader
from server.checkpoint.experts.tensors import CheckpointTensors
from server.checkpoint.inspection import CheckpointInfo, inspect_checkpoint
from server.checkpoint.late import NO_ECONOMIES, Economies, LateLoader
from server.checkpoint.names import is_ignored
from server.checkpoint.packed import keeps_fp4
from server.checkpoint.parts import weight_parts
from server.checkpoint.quantizer import TensorRefused, by_file

logger = logging.getLogger(__name__)


def load_model(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    towers: bool = False,
    economies: Economies = NO_ECONOMIES,
) -> PreTrainedModel:
    """The model in folder, in eval mode on device: NF4 linear layers, everything else in dtype.

    towers: whether the parts that only images go through are loaded. economies: what else becomes NF4.

    A 16 or 32 bit checkpoint is quantized to NF4 (blocks of 64, double quantization) while loading, one tensor at a
    time. Raises CheckpointError for a checkpoint that is damaged, incomplete, unsupported or too large for the memory.
    """
    info = inspect_checkpoint(folder)
    chosen = loading_of(info)
    check_memory(folder, device, whole_bytes(info, device, dtype, chosen, towers, economies))
    options = _quantization_options(info, chosen.config, dtype)
    tensors = CheckpointTensors(folder, info.files)
    experts = ExpertsLoader(tensors, device, dtype, info.quantization == "none")
    late = LateLoader(info, tensors, device, dtype, economies)

    def take_over(model: PreTrainedModel, names: Mapping[str, str]) -> None:
        late.take_over(model, names)
        experts.take_over(model)

    fp4 = keeps_fp4(device)
    stage = "loading weights" if info.quantization == "nf4" else "loading and quantizing weights"
    try:
        with _reported(progress, stage), by_file(info, chosen.key_mapping, take_over, towers, fp4), _quiet():
            model, report = chosen.auto.from_pretrained(
                folder,
                config=chosen.config,
                key_mapping=chosen.key_mapping,
                generation_config=end_tokens(folder),
                dtype=dtype,
                device_map={"": device},
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
    except (CheckpointError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except TensorRefused as e:
        raise CheckpointError(f"{folder}: {e}") from e
    except Exception as e:
        raise CheckpointError(f"{folder}: cannot be loaded: {_reason(e, info)}") from e
    _check_complete(folder, _without_head(folder, model, report), chosen.config, (*late.names, *experts.names))
    experts.fill(model, progress)
    late.fill(model, progress)
    _set_dtype(model, dtype)
    logger.info("%s: %s", folder.name, linear_layers(model))
    keep_within_tables(model)
    add_image_outputs(model)
    check_finite(folder, model)
    return model.eval().requires_grad_(False)


def _quantization_options(info: CheckpointInfo, config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Settings of quantization for transformers, in config or beside it: what the files hold, not config.json's."""
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    if info.quantization == "none":
        return {"quantization_config": settings}
    config.quantization_config = settings.to_dict()
    return {}


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


def whole_bytes(
    info: CheckpointInfo,
    device: torch.device,
    dtype: torch.dtype,
    chosen: Loading,
    towers: bool,
    economies: Economies = NO_ECONOMIES,
) -> int:
    """Bytes that load_model() takes on device; chosen: what loading_of() says."""
    loaded = info.without(is_ignored if towers else lambda name: is_left_out(name, chosen.config))
    parts = weight_parts(loaded, dtype.itemsize, keeps_fp4(device))
    return sum(economies.applied(parts, dtype.itemsize).values())


def check_memory(folder: Path, device: torch.device, needed: int, shards: int = 1) -> None:
    """Raise CheckpointError where weights of needed bytes, those of one of `shards`, do not fit into the device's memory."""
    free = available_bytes(device)
    if needed > free:
        raise CheckpointError(
            f"{folder}: too large: its weights take {needed / 2**30:.1f} GiB in NF4"
            f"{f' on each of {shards} devices' if shards > 1 else ''}, {free / 2**30:.1f} GiB are free on {device};"
            " engine.tensor_parallel_size divides them among several GPUs"
        )


def _reason(error: Exception, info: CheckpointInfo) -> str:
    """Why transformers cannot load a checkpoint, in a line. Its own may point to a report that is not logged."""
    if "above report" not in str(error):
        return first_line(error)
    if info.quantization == "none":
        return "its tensors do not have the shapes that transformers' class of it needs"
    return (
        "transformers' class of it splits or joins tensors while loading, which cannot be done with tensors in 4 bit;"
        " the same model in 16 bit may work, which is quantized while loading"
    )


def _without_head(folder: Path, model: PreTrainedModel, report: dict[str, Any]) -> dict[str, Any]:
    """The report of a load, without a missing head where the checkpoint is an embedding model, which needs none.

    The input embeddings take its place, as in models that tie both.
    """
    missing = set(report.get("missing_keys") or [])
    if missing != {"lm_head.weight"} or not (folder / MODULES).exists():
        return report
    logger.warning("%s: an embedding model without lm_head: what it generates means nothing", folder)
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return report | {"missing_keys": []}


def _check_complete(folder: Path, report: dict[str, Any], config: Any, taken: Iterable[str]) -> None:
    """transformers fills what a checkpoint lacks with random numbers; a server must not answer from those.

    taken: patterns of the names of tensors that are loaded without transformers.
    """
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        found = list(report.get(what) or [])
        if found:
            raise CheckpointError(f"{folder}: damaged: {what.replace('_', ' ')}: {found[0]} ({len(found)} in all)")
    is_taken = re.compile("|".join(taken) or "(?!)").search
    unexpected = [name for name in report.get("unexpected_keys") or () if not is_taken(name)]
    left_out = [name for name in unexpected if is_left_out(name, config)]
    if left_out:
        logger.info("%s: only text is served: %d tensors for images and sounds are left out", folder, len(left_out))
    if unexpected := sorted(set(unexpected) - set(left_out)):
        logger.warning("%s: %d tensors are not part of the model, %s first", folder, len(unexpected), unexpected[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """While entered, transformers does not log its table of what is missing; _check_complete says it in one line."""
    reporter = logging.getLogger("transformers.modeling_utils")

    def is_no_report(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    reporter.addFilter(is_no_report)
    try:
        yield
    finally:
        reporter.removeFilter(is_no_report)


@contextmanager
def _reported(progress: Progress, stage: str) -> Iterator[None]:
    """While entered, transformers' loading bar calls progress instead of drawing itself."""

    def report(items: Iterable[Any]) -> Iterator[Any]:
        listed = list(items)
        step = max(1, len(listed) // 100)
        for done, item in enumerate(listed):
            if done % step == 0:
                progress(stage, done / len(listed))
            yield item
        progress(stage, 1.0)

    previous = transformers_logging.set_tqdm_hook(lambda _bar, items, _options: report(*items))
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
