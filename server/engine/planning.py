"""The memory plan of a start on a GPU: in the log before anything is loaded, and in the errors of a lack of memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from server.checkpoint.base import CheckpointError
from server.checkpoint.classes import is_left_out, loading_of, read_config
from server.checkpoint.diagnosis import first_line
from server.checkpoint.inspection import CheckpointInfo, inspect_checkpoint
from server.checkpoint.names import is_of_tower
from server.checkpoint.parts import described_by
from server.config import EngineConfig
from server.engine.runtime.limits import EngineConfigError, MemoryTooSmallError
from server.engine.runtime.memory import is_out_of_memory, reserve
from server.engine.runtime.preparation.plan import Memory, MemoryPlan, decide, plan_memory, savings

logger = logging.getLogger(__name__)

OUTPUT_LAYER_IN_NF4 = (
    "engine.quantize_output_layer auto: the output layer becomes NF4, because the KV cache would be too small otherwise"
)


@dataclass(frozen=True)
class StartMemory:
    """Memory of a start before it loads; without a plan on a CPU, and for configurations it cannot read."""

    device: torch.device
    config: EngineConfig
    """The configuration, without an auto that the plan decides."""
    plan: MemoryPlan | None = None
    savings: dict[str, int] = field(default_factory=dict)
    """Options that would free memory, each with its bytes."""

    @property
    def advice(self) -> str:
        """The end of a message about a lack of memory."""
        if self.plan is None:
            return "there is no memory plan that would say which options free memory"
        options = ", ".join(f"{option} ({size / 2**30:.2f} GiB)" for option, size in self.savings.items())
        return f"options that free memory: {options}" if options else "no option would free memory"

    @property
    def kept(self) -> int:
        """MemoryPlan.kept."""
        return self.plan.kept if self.plan else 0

    def check(self, folder: Path, logs: bool) -> None:
        """Raise CheckpointError where the weights do not fit. logs: the plan, and a warning of a KV cache of few tokens."""
        if (plan := self.plan) is None:
            return
        if logs:
            logger.info("%s", plan.table())
        if plan.weights > plan.memory.free:
            raise CheckpointError(
                f"{folder}: too large: its weights take {plan.weights / 2**30:.1f} GiB in NF4,"
                f" {plan.memory.free / 2**30:.1f} of {plan.memory.total / 2**30:.1f} GiB are free on {self.device};"
                f" {self.advice}"
            )
        if logs and not plan.fits:
            logger.warning(
                "the KV cache will hold about %d tokens, %d are wanted; %s", plan.tokens, plan.wanted, self.advice
            )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """While entered, errors of a lack of memory are EngineConfigErrors that name the options which help."""
        try:
            yield
        except MemoryTooSmallError as e:
            raise EngineConfigError(f"{e}; {self.advice}" if self.plan else str(e)) from e
        except (CheckpointError, RuntimeError) as e:
            if not is_out_of_memory(e) and not is_out_of_memory(e.__cause__):
                raise
            raise EngineConfigError(f"out of memory on {self.device}: {first_line(e)}; {self.advice}") from e


UNPLANNED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a plan raises for a model of a kind that it does not know."""
Described = tuple[CheckpointInfo, Any]
"""The tensors of a checkpoint that may be loaded, and transformers' configuration of it."""


def plan_start(
    folder: Path, config: EngineConfig, device: torch.device, towers: bool = False, ranks: int = 1
) -> StartMemory:
    """The plan of a start of one of `ranks` processes on its device; towers: whether it loads what images go through.

    Raises CheckpointError for a checkpoint that cannot be read.
    """
    if device.type != "cuda":
        return StartMemory(device, _without_auto(config))
    free, total = torch.cuda.mem_get_info(device)
    drafts = config.speculation == "draft" and config.draft_model is not None
    try:
        model = _described(folder, config)
        draft = _described(Path(str(config.draft_model)), config) if drafts else None
        found = plan_on(Memory(free, total, reserve(device, total)), device, config, model, draft, towers, ranks)
    except UNPLANNED as e:
        # An estimate refuses no model.
        logger.warning("%s: no memory plan: %s", folder.name, first_line(e))
        return StartMemory(device, _without_auto(config))
    if config.quantize_output_layer == "auto" and found.config.quantize_output_layer == "nf4":
        logger.info("%s", OUTPUT_LAYER_IN_NF4)
    return found


def plan_on(
    memory: Memory,
    device: torch.device,
    config: EngineConfig,
    model: Described,
    draft: Described | None = None,
    towers: bool = False,
    ranks: int = 1,
) -> StartMemory:
    """plan_start() of checkpoints that have been looked at, on a device with that memory."""
    info, of_model = model

    def plan(engine: EngineConfig) -> MemoryPlan:
        loaded = info if towers and engine.images is not False else info.without(is_of_tower)
        return plan_memory(loaded, of_model, engine, memory, draft=draft, ranks=ranks)

    decided = decide(config, plan) if ranks == 1 else _without_auto(config)
    return StartMemory(device, decided, plan(decided), savings(decided, plan, torch.cuda.device_count(), ranks))


def _without_auto(config: EngineConfig) -> EngineConfig:
    auto = config.quantize_output_layer == "auto"
    return config.model_copy(update={"quantize_output_layer": "off"}) if auto else config


def _described(folder: Path, config: EngineConfig) -> Described:
    if config.load_format == "dummy":
        model = read_config(folder)
        return described_by(folder, model), model
    return described(inspect_checkpoint(folder))


def described(info: CheckpointInfo) -> Described:
    """A checkpoint without the tensors that are never loaded, and its configuration."""
    model = loading_of(info).config
    return info.without(lambda name: is_left_out(name, model) and not is_of_tower(name)), model
