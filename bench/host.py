"""The host's time of a decode step: scheduling, the batch, the attention's tables, taking the tokens. Needs no GPU.

python -m bench.host

The engine runs as it serves, with async scheduling, on a runner without a model. Times are medians over the steps, in
milliseconds of the thread's processor time, so that other processes of the machine do not count. A GPU waits for this
work where its own step takes less time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from bench.machine import cores, cpu_name, versions
from nf4_kernels.timing import KernelTimes
from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.attention.flashinfer.page_tables import page_tables
from server.engine.runtime.attention.kernels.decode.attention import layout
from server.engine.runtime.attention.kernels.decode.compiled_kernel import Rooms
from server.engine.runtime.attention.kernels.device_tables import DeviceTables
from server.engine.runtime.batch import Batch, batch_of
from server.engine.runtime.limits import ModelLimits
from server.engine.runtime.memory import MemoryGauge
from server.engine.runtime.runner import ModelRunner
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.runtime.step_input import step_input
from server.engine.scheduling.step import Step
from server.types import GenerateRequest, SamplingParams

CASES = ((128, 200), (256, 200), (256, 2000), (256, 8000), (512, 1000), (1024, 1000))
"""(sequences, tokens of each before the first measured step)."""
STEPS = 50
WARM_UPS = 5
VOCABULARY = 32_000
# As on an H100 or H200 for a model of 8 key heads of 128.
ROOMS = Rooms(132, [8], [True], split=True)
PARTS = ("schedule", "batch", "layout", "tokens")
"""Parts of the host's work for a decode step that runs as a CUDA graph; their sum is nearly the step."""
COLUMNS = (*PARTS, "step", "tables")


@dataclass
class HostRunner:
    """Does a runner's work on the host, and samples one token without a model."""

    limits: ModelLimits
    block_size: int
    sequences: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    adapters: None = None
    tower: None = None
    nf4_weight_bytes: int = 0
    graph_replays: int = 0
    step_costs: None = None
    draft_model: None = None
    states: None = None
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The time of the present step, by part."""

    def __post_init__(self) -> None:
        self.memory = MemoryGauge(self.device)
        self.tables = DeviceTables(self.sequences, -(-self.limits.max_model_len // self.block_size), 0, self.device)
        self.batch: Batch | None = None
        """The batch of the latest step."""

    def kernel_times(self) -> KernelTimes:
        """No kernels run."""
        return KernelTimes()

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time while entered to a part's."""
        started = time.thread_time()
        try:
            yield
        finally:
            self.seconds[part] += time.thread_time() - started

    def execute(self, step: Step) -> list[Sampled]:
        """Prompts' chunks, which are not measured."""
        return [Sampled(7) for _ in step.sampled]

    def execute_async(self, step: Step, previous: PendingStep | None) -> PendingStep | None:
        """Do the host's part of GraphSet.run(); see CudaBackend.plan_decode_graph()."""
        if not step.samples_each:
            return None
        with self.timed("batch"):
            self.batch = batch_of(step_input(step), self.block_size)
        with self.timed("layout"):
            spans = self.batch.spans
            self.tables.update(spans)
            layout(spans.ends, spans.rows, [None], ROOMS.of(len(spans), False))
        return PendingStep(step, torch.full((2, step.size), 7.0))


@dataclass(frozen=True)
class PendingStep:
    """Stands for a LaunchedStep whose tokens are known at once."""

    step: Step
    copied: torch.Tensor

    def complete(self) -> bool:
        """True: the tokens are there."""
        return True

    def read(self) -> list[Sampled]:
        """The tokens."""
        _, tokens = self.copied.tolist()
        return [Sampled(int(token)) for token in tokens]


def decoding(sequences: int, context: int, steps: int) -> tuple[Engine, HostRunner]:
    """An engine whose sequences have been prefilled and decode steps more tokens."""
    config = EngineConfig(device="cpu", max_num_seqs=sequences, max_num_batched_tokens=max(8192, sequences))
    length = context + steps + config.block_size
    limits = ModelLimits(length, sequences * -(-length // config.block_size), VOCABULARY, (), sequences)
    runner = HostRunner(limits, config.block_size, sequences)
    engine = Engine(cast(ModelRunner, runner), config)
    rng = random.Random(0)
    for index in range(sequences):
        prompt = rng.choices(range(VOCABULARY), k=context)
        params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
        engine.add(GenerateRequest(str(index), prompt, params))
    return engine, runner


def measure(sequences: int, context: int, steps: int = STEPS) -> dict[str, float]:
    """Median milliseconds of a decode step's parts and of all of it; "tables": what an eager step's begin() builds."""
    # Prompts that are prefilled first decode until the last one's prefill.
    engine, runner = decoding(sequences, context, WARM_UPS + steps + 2 + sequences * context // 4096)
    scheduler: Any = engine._scheduler
    scheduler.schedule = _timed(runner, "schedule", scheduler.schedule)
    samples: defaultdict[str, list[float]] = defaultdict(list)
    warm_ups = WARM_UPS
    while len(samples["step"]) < steps:
        runner.seconds.clear()
        started = time.thread_time()
        outputs = engine.step().outputs
        step = time.thread_time() - started
        if len(outputs) < sequences or "layout" not in runner.seconds:
            continue  # prompts are still prefilled
        if warm_ups:
            warm_ups -= 1
            continue
        assert runner.batch is not None
        with runner.timed("tables"):
            page_tables(runner.batch.spans, runner.block_size)
        own = dict(runner.seconds)
        own["step"] = step
        own["tokens"] = step - sum(own[part] for part in PARTS if part != "tokens")
        for name, seconds in own.items():
            samples[name].append(1000 * seconds)
    return {name: round(statistics.median(samples[name]), 3) for name in COLUMNS}


def _timed(runner: HostRunner, part: str, function: Callable[[], Step]) -> Callable[[], Step]:
    def call() -> Step:
        with runner.timed(part):
            return function()

    return call


def main() -> int:
    """Print a table, and then a JSON row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each case")
    steps = parser.parse_args().steps
    print(f"{'sequences':>9} {'context':>8} " + " ".join(f"{name:>9}" for name in COLUMNS), flush=True)
    rows = []
    for sequences, context in CASES:
        found = measure(sequences, context, steps)
        print(f"{sequences:>9} {context:>8} " + " ".join(f"{found[name]:9.3f}" for name in COLUMNS), flush=True)
        rows.append({"sequences": sequences, "context": context, "unit": "ms", **found})
    machine = {"cpu": cpu_name(), "cores": cores(), **versions()}
    for row in rows:
        print(json.dumps(row | machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
