"""Times of GEMMs' launches on this GPU, by which they are chosen, kept in the cache: python -m nf4_kernels.tune --help.

They belong to a GPU's name, its driver, torch, the kernels' sources and a weight's shape; what the cache has for another of
these is not found. bfloat16 and float16 share them. A start uses what is kept, and with NF4_TUNE=on measures what is not.
NF4_TUNE=off leaves all choices to the fitted costs, and so do GPUs with wgmma, where a launch alone says too little of one
in a layer (docs/adr/0046-measured-launches.md).
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from nf4_kernels import build, cuda
from nf4_kernels.cuda import launches
from nf4_kernels.cuda.device import arch
from nf4_kernels.format import Weight, second_level
from nf4_kernels.library_files import cache_folder
from nf4_kernels.params import Nf4Weight, weight_struct
from nf4_kernels.plan import Plan
from nf4_kernels.plan.measured import TOKENS, Times, shape_name, shortlist

logger = logging.getLogger(__name__)

BUDGET_S = 20.0
"""Seconds after which no further shape is begun."""
_ROUNDS = 5
_FORMAT = 1

Shapes = Mapping[str, Sequence[Weight]]
"""Weights of a model by shape_name(): several of each, so that their codes come from memory, as in a step."""
Progress = Callable[[str, float], None]


def by_shape(weights: Sequence[Weight]) -> dict[str, list[Weight]]:
    """The weights on GPUs that a launch of ours could take, by shape; the largest shape comes first."""
    found: dict[str, list[Weight]] = {}
    for weight in sorted(weights, key=lambda weight: -weight.matrix[0] * weight.matrix[1]):
        if weight.packed.is_cuda and weight.table == "nf4":
            found.setdefault(_name(weight), []).append(weight)
    return found


def tuned(shapes: Shapes, dtype: torch.dtype, progress: Progress, budget_s: float = BUDGET_S) -> dict[str, Times]:
    """The times of these shapes, on the current device: kept ones; if NF4_TUNE is on, others are measured now and kept.

    Call where no graph is being captured. Empty in float32, if NF4_TUNE is off, on GPUs with wgmma, or if the kernels cannot
    be used. Shapes for which budget_s is too short are left out, and measured the next time.
    """
    if _wish() == "off" or not shapes or dtype == torch.float32 or cuda.load_error() is not None or _has_wgmma():
        return {}
    if (wish := _wish()) not in ("", "on"):
        logger.warning("NF4_TUNE is %r, neither on nor off: nothing is measured, kept times are used", wish)
    times, begun = kept(), time.monotonic()
    missing = [shape for shape in shapes if shape not in times] if wish == "on" else []
    for done, shape in enumerate(missing):
        if time.monotonic() - begun > budget_s:
            logger.warning(
                "no time left to measure launches for weights of %s: fitted costs", "; ".join(missing[done:])
            )
            break
        progress(f"timing launches for {shape}", done / len(missing))
        try:
            times[shape] = measure(shapes[shape], dtype)
        except torch.OutOfMemoryError as e:
            reason = str(e).partition("\n")[0]
            logger.warning("no memory to measure launches for weights of %s, fitted costs: %s", shape, reason)
    if missing:
        torch.cuda.empty_cache()
        _keep(times)
        progress("timing launches", 1.0)
    return {shape: times[shape] for shape in shapes if shape in times}


def measure(weights: Sequence[Weight], dtype: torch.dtype) -> Times:
    """Time the likeliest launches for weights of one shape, in CUDA graphs that go through the weights."""
    n, k = weights[0].matrix
    cached = torch.cuda.get_device_properties(weights[0].packed.device).L2_cache_size
    count = min(len(weights), 1 + 2 * cached // (n * k // 2))
    structs = [_struct(weight) for weight in weights[:count]]
    found: dict[int, dict[str, float]] = {}
    for tokens in TOKENS:
        options = shortlist(launches.candidates_on(weights[0].packed.device, tokens, *_plan_arguments(weights[0])))
        if len(options) > 1:
            x = torch.randn(tokens, k, dtype=dtype, device=weights[0].packed.device)
            runs = [partial(_run, option, x, structs) for option in options]
            found[tokens] = {
                str(option): round(us / count, 2) for option, us in zip(options, microseconds(runs), strict=True)
            }
    return found


def microseconds(runs: Sequence[Callable[[], object]]) -> list[float]:
    """The least time of each run in a CUDA graph. They take turns: where power is short, one slows down the next."""
    for run in runs:
        run()  # here, as each stream that a launch is not captured on gets a workspace
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graphs = [torch.cuda.CUDAGraph() for _ in runs]
        torch.cuda.synchronize()
        for graph, run in zip(graphs, runs, strict=True):
            # torch.cuda.graph() would collect garbage each time.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        least = [float("inf")] * len(graphs)
        for turn in range(_ROUNDS + 1):
            for index, graph in enumerate(graphs):
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                if turn:
                    least[index] = min(least[index], begin.elapsed_time(end) * 1e3)
    torch.cuda.current_stream().wait_stream(stream)
    return least


def _run(choice: Plan, x: torch.Tensor, structs: Sequence[Nf4Weight]) -> None:
    out, fusion = x.new_empty(x.shape[0], structs[0].n), launches.Fusion(None, None, None, 0.0)
    for struct in structs:
        launches.gemm_by(choice, out, x, struct, fusion)


def _struct(weight: Weight) -> Nf4Weight:
    return weight_struct(weight, *weight.matrix, None if weight.absmax_8bit is None else second_level(weight))


def _plan_arguments(weight: Weight) -> tuple[int, int, int, bool]:
    return *weight.matrix, weight.blocksize, weight.absmax_8bit is not None


def _name(weight: Weight) -> str:
    return shape_name(*_plan_arguments(weight))


def kept() -> dict[str, Times]:
    """Read the cache for the current device, driver and kernels: nothing if NF4_TUNE is off."""
    if _wish() == "off":
        return {}
    try:
        stored = json.loads(_file().read_text())
        return {
            shape: {int(tokens): {name: float(us) for name, us in row.items()} for tokens, row in times.items()}
            for shape, times in stored["shapes"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def use_kept() -> None:
    """Choose launches on the current device by what is kept. It starts CUDA: call it in the process that computes."""
    launches.use_times(torch.device("cuda", torch.cuda.current_device()), kept())


def _has_wgmma() -> bool:
    return arch(torch.device("cuda", torch.cuda.current_device())) == 90


def _wish() -> str:
    return os.environ.get("NF4_TUNE", "").strip().lower()


def _keep(times: Mapping[str, Times]) -> None:
    try:
        path = _file()
        own = path.with_suffix(f".{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(json.dumps({"shapes": {**kept(), **times}}, indent=1))
        own.replace(path)
    except OSError as e:
        logger.warning("times of launches are not kept, and measured again at the next start: %s", e)


def _file() -> Path:
    index = torch.cuda.current_device()
    properties, capability = torch.cuda.get_device_properties(index), arch(torch.device("cuda", index))
    name, multiprocessors = properties.name, properties.multi_processor_count
    parts = [_FORMAT, name, multiprocessors, capability, _driver(), torch.__version__, build.sources_digest()]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    return cache_folder() / "times" / f"{re.sub('[^a-z0-9]+', '-', name.lower())}-{digest}.json"


def _driver() -> int:
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _random(n: int, k: int, blocksize: int, nested: bool) -> Weight:
    blocks = n * k // blocksize
    packed = torch.randint(0, 256, (n * k // 2, 1), dtype=torch.uint8, device="cuda")
    if not nested:
        return Weight(packed, (n, k), torch.rand(blocks, device="cuda") * 0.02, blocksize)
    codes = torch.randint(0, 256, (blocks,), dtype=torch.uint8, device="cuda")
    absmax, table = torch.rand(-(-blocks // 256), device="cuda") * 0.01, torch.linspace(-1, 1, 256, device="cuda")
    return Weight(packed, (n, k), absmax, blocksize, codes, table, torch.tensor(0.05, device="cuda"))


def main() -> int:
    """Measure what is not kept, print all; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m nf4_kernels.tune",
        description="Measure which launches compute GEMMs fastest on this GPU, for the server and for "
        "nf4_kernels.tune.use_kept(). A start of the server with NF4_TUNE=on measures its model's weights by itself.",
    )
    parser.add_argument("shapes", nargs="+", metavar="NxK", help="a weight's output and input features: 28672x4096")
    parser.add_argument("--blocksize", type=int, default=64)
    parser.add_argument("--plain", action="store_true", help="scales are not quantized themselves")
    options = parser.parse_args()
    pairs = [re.fullmatch(r"(\d+)x(\d+)", shape) for shape in options.shapes]
    if None in pairs:
        parser.error("a shape is NxK, such as 28672x4096")
    if reason := cuda.load_error():
        print(f"nf4_kernels.tune: no CUDA kernels: {reason}", file=sys.stderr)
        return 1
    os.environ["NF4_TUNE"] = "on"
    if _has_wgmma():
        print("nf4_kernels.tune: on GPUs with wgmma the fitted costs choose", file=sys.stderr)
        return 1
    device, copies = torch.device("cuda", torch.cuda.current_device()), 12
    for n, k in ((int(pair[1]), int(pair[2])) for pair in pairs if pair):
        launches.use_times(device, {})
        weights = [_random(n, k, options.blocksize, not options.plain) for _ in range(copies)]
        arguments = _plan_arguments(weights[0])
        times = tuned(by_shape(weights), torch.bfloat16, lambda *_: None)
        fitted = {tokens: cuda.plan_on(device, tokens, *arguments) for tokens in TOKENS}
        launches.use_times(device, times)
        print(_name(weights[0]))
        for tokens, row in times.get(_name(weights[0]), {}).items():
            chosen = cuda.plan_on(device, tokens, *arguments)
            slices = launches.candidates_on(device, tokens, *arguments)[-1][0]
            us = [f"{what} {row[str(one)]:7}" for what, one in (("fitted", fitted[tokens]), ("dequantized", slices))]
            print(f"{tokens:5} tokens: {row[str(chosen)]:7} us ({', '.join(us)})  {chosen}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
