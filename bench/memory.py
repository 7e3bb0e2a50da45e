"""Memory of a small GPU that a start and a long request take: python -m bench.memory --help.

This process holds the memory of a larger GPU but for a case's GiB, so that the driver gives no more than these, to CUDA
graphs and the code of kernels neither. Each case is an engine with random weights in a process of its own, for which the
GPU's memory is that size. Writes bench/results/memory-<device>.json; the rows that the file had become its "before".
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.e2e.engine_speed import decode
from bench.e2e.results import Row
from bench.machine import current_commit, gpu_in_file_names, versions
from server.checkpoint.base import CheckpointError
from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.planning import plan_start
from server.engine.runtime.limits import EngineConfigError
from server.engine.start import load_runner
from server.engine.supervisor.child import ENVIRONMENT

MODELS = Path(__file__).parent / "models"
RESULTS = Path(__file__).parent / "results"
CASES = (
    "qwen3-32b:23:8192",
    "qwen3-14b:15:16384",
    "gpt-oss-20b:15:16384",
    "llama-3.1-8b:23:32768",
    "qwen3-32b:17:8192",
    "llama-3.1-8b:7.5:4096",
    "llama-3.1-8b:7.5:32768",
)
"""Qwen3-32B into 17 GiB and the last one do not fit."""
ANSWER = 64
_CASE_S = 100


class Case(NamedTuple):
    """A model, the GPU's memory in GiB and the tokens of the longest context."""

    model: str
    gib: float
    tokens: int

    @classmethod
    def of(cls, text: str) -> Case:
        """The case model:gib:tokens. ValueError for anything else."""
        model, gib, tokens = text.split(":")
        return cls(model, float(gib), int(tokens))

    def __str__(self) -> str:
        return f"{self.model}:{self.gib:g}:{self.tokens}"


class LowestFree(threading.Thread):
    """Asks for the free bytes time and again."""

    def __init__(self, free: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self._free = free
        self.bytes = free()
        """The fewest that were free."""

    def run(self) -> None:
        while True:
            self.bytes = min(self.bytes, self._free())
            time.sleep(0.02)


def measure(case: Case) -> Row:
    """The bytes of each part after a start, the fewest free bytes, and the request's speed; or the error of the start."""
    device, total = torch.device("cuda", 0), int(case.gib * 2**30)
    ask = torch.cuda.mem_get_info
    torch.cuda.mem_get_info = lambda *_: (ask(device)[0], total)

    def free() -> int:
        return ask(device)[0]

    context = total - free()
    lowest = LowestFree(free)
    lowest.start()
    config = EngineConfig(device="cuda", load_format="dummy", max_model_len=case.tokens)
    weights = 0

    def progress(stage: str, _: float) -> None:
        nonlocal weights
        if stage == "preparing the model":
            weights = torch.cuda.memory_allocated()

    row: Row = {"model": case.model, "gib": case.gib, "tokens": case.tokens, "context": context}
    started = time.perf_counter()
    try:
        start = plan_start(MODELS / case.model, config, device)
        assert start.plan is not None
        plan, row["output_layer"] = start.plan, start.config.quantize_output_layer
        row["plan"] = {**{name: size for name, size in plan.parts.items() if size}, "tokens": plan.tokens}
        runner = load_runner(MODELS / case.model, config, progress)
    except (CheckpointError, EngineConfigError) as e:
        return {**row, "error": str(e)}
    row["ready_s"] = round(time.perf_counter() - started, 1)
    for thread in threading.enumerate():
        if thread.name == "flashinfer":
            thread.join(30)
    gc.collect()
    torch.cuda.empty_cache()
    limits = runner.limits
    cache = limits.num_blocks * config.block_size * plan.token
    copies = runner.expanded_weight_bytes
    rest = total - free() - context - weights - copies - cache
    row |= {"weights": weights, "copies": copies, "kv_cache": cache, "kv_tokens": limits.num_blocks * config.block_size}
    row |= {"graphs_and_workspaces": rest, "of_these_tensors": torch.cuda.memory_allocated() - weights - copies - cache}
    engine = Engine(runner, config)
    prompt = case.tokens - ANSWER
    row["long_tok_s"] = decode(engine, 1, limits.vocab_size, 1, prompt, ANSWER)["tok_s"]
    row["many_tok_s"] = decode(engine, limits.max_num_seqs, limits.vocab_size, 2, 32, ANSWER)["tok_s"]
    row |= {"sequences": limits.max_num_seqs, "lowest_free": lowest.bytes, "peak": total - lowest.bytes}
    return row


def rows_of(cases: list[Case], timeout: float) -> Iterator[Row]:
    """A row for each case, which has so many seconds. Processes import side by side, and load one after the other."""
    command = [sys.executable, "-m", "bench.memory"]
    children = [
        subprocess.Popen([*command, "--case", str(case)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for case in cases
    ]
    for case, child in zip(cases, children, strict=True):
        free = torch.cuda.mem_get_info()[0]
        held = torch.empty(free - int(case.gib * 2**30), dtype=torch.uint8, device="cuda")
        try:
            found, _ = child.communicate("begin\n", timeout=timeout)
            row: dict[str, Any] = json.loads(found.splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError) as e:
            child.kill()
            row = {"model": case.model, "gib": case.gib, "tokens": case.tokens, "failed": f"{type(e).__name__}: {e}"}
        child.wait()
        yield row
        del held
        torch.cuda.empty_cache()


def main() -> int:
    """Measure every case and write the result; with --case measure one in this process."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("cases", nargs="*", type=Case.of, default=[Case.of(case) for case in CASES])
    parser.add_argument("--case", type=Case.of, help=argparse.SUPPRESS)
    parser.add_argument("--timeout", type=float, default=_CASE_S, help="seconds for a case")
    parser.add_argument("--out", type=Path, help="the file that rows go to")
    options = parser.parse_args()
    if ENVIRONMENT.keys() - os.environ:
        # The server starts its engine with these variables; C libraries and torch read them when they are loaded.
        os.execve(sys.executable, [sys.executable, "-m", "bench.memory", *sys.argv[1:]], {**ENVIRONMENT, **os.environ})
    if options.case:
        logging.basicConfig(level=logging.INFO)
        sys.stdin.readline()
        print(json.dumps(measure(options.case)), flush=True)
        os._exit(0)  # the end of a process with graphs takes seconds
    device = gpu_in_file_names()
    path = options.out or RESULTS / f"memory-{device}.json"
    what = "random weights, bytes; graphs_and_workspaces: all but the CUDA context, weights, copies and the cache"
    state = {"device": device, "versions": versions(), "what": what}
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    rows: list[Row] = []
    for row in rows_of(options.cases, options.timeout):
        rows.append({**row, "commit": current_commit()})
        print(json.dumps(row), flush=True)
        path.write_text(json.dumps({**state, "rows": rows, "before": before}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
