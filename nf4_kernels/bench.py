"""python -m nf4_kernels.bench: our kernels beside bitsandbytes, bfloat16 cuBLAS and the floor, on this machine's GPU.

Everything in one run. Products are timed inside CUDA graphs, as a serving engine replays them; before each a kernel
reads 256 MB, so that nothing of the launch's data is in L2, and the time of these reads alone is subtracted.
Dequantizations are timed as single launches between events. The floor is the larger of the bytes that must move over the
copy bandwidth and the FLOPs over the matmul rate of the same run.
Writes bench/results/kernels-<device>.json; bench/kernels.py makes a table of it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nf4_kernels import cuda, cuda_library, reference
from nf4_kernels.params import Nf4Weight

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# (N, K) of every projection: q, k and v, o, gate and up, down.
MODELS = {
    "Qwen3-32B": {"q": (8192, 5120), "kv": (1024, 5120), "o": (5120, 8192), "up": (25600, 5120), "down": (5120, 25600)},
    "Gemma-3-27B": {
        "q": (4096, 5376),
        "kv": (2048, 5376),
        "o": (5376, 4096),
        "up": (21504, 5376),
        "down": (5376, 21504),
    },
    "Llama-3.3-70B": {"q": (8192, 8192), "kv": (1024, 8192), "up": (28672, 8192), "down": (8192, 28672)},
}
BLOCKSIZE = 64
_FLUSH_BYTES = 256 << 20
_REPLAYS = 9
_WARM_UP = 20  # enough for the clocks to rise


@dataclass(frozen=True)
class Row:
    """One measurement; times in microseconds, None where there is nothing to compare with."""

    op: str
    model: str
    shape: str
    N: int
    K: int
    M: int | None
    ours_us: float
    bnb_us: float | None
    bf16_us: float | None
    floor_us: float
    tree_us: float | None = None
    choice: str | None = None


class Bench:
    """Clocks launches on the current device with a cold L2."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self._flush = torch.randn(_FLUSH_BYTES // 4, device="cuda")
        self._flush_us = 0.0
        self._replay([None])
        self._flush_us = self._replay([None])[0]
        a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
        b = torch.empty_like(a)
        self.copy_bytes_per_us: float = 2 * a.numel() / self.time_alone(partial(b.copy_, a))
        del a, b
        x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
        self.flops_per_us: float = 2.0 * 8192**3 / self.time_alone(lambda: x @ x)

    def time(self, *launches: Callable[[], object]) -> list[float]:
        """Median microseconds of each launch inside a CUDA graph, as a serving engine replays it, with a cold L2.

        They take turns, each first as often as the others: where power is short, what ran before slows down what comes next.
        """
        return [(replay - self._flush_us) / self.repeats for replay in self._replay(launches)]

    def time_alone(self, launch: Callable[[], object]) -> float:
        """Median microseconds of a launch between two events, with a cold L2: for launches that write more than L2 holds.

        What lies in L2 at their end is written back under what comes next, for the copy of the floor as for them.
        """
        launch()
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(self.repeats)
        ]
        for begin, end in events:
            torch.amax(self._flush)
            begin.record()
            launch()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(float(begin.elapsed_time(end)) * 1e3 for begin, end in events)

    def warm_up(self) -> None:
        """Half a second of reads. What is timed first after a pause comes out slower: up to 8 us were seen, a quarter."""
        deadline = time.perf_counter() + 0.5
        while time.perf_counter() < deadline:
            for _ in range(20):
                torch.amax(self._flush)
            torch.cuda.synchronize()

    def _replay(self, launches: Sequence[Callable[[], object] | None]) -> list[float]:
        """Median microseconds of one replay of `repeats` flushes, each followed by the launch, for each of launches."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graphs = [self._capture(launch, stream) for launch in launches]
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            taken: list[list[float]] = [[] for _ in graphs]
            for turn in range(_WARM_UP + _REPLAYS):
                for place in range(len(graphs)):
                    which = (turn + place) % len(graphs)
                    begin.record(stream)
                    graphs[which].replay()
                    end.record(stream)
                    stream.synchronize()
                    taken[which].append(float(begin.elapsed_time(end)) * 1e3)
        return [statistics.median(times[_WARM_UP:]) for times in taken]

    def _capture(self, launch: Callable[[], object] | None, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        if launch:
            launch()
            launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(self.repeats):
                torch.amax(self._flush)
                if launch:
                    launch()
        return graph

    def floor(self, moved_bytes: float, flops: float = 0.0) -> float:
        return max(moved_bytes / self.copy_bytes_per_us, flops / self.flops_per_us)


@dataclass(frozen=True)
class Random:
    """Random codes and nested scales of a weight [n, k]; scales is the same weight's plain absmax."""

    n: int
    k: int
    packed: Tensor
    absmax: Tensor
    codes: Tensor
    table: Tensor
    offset: Tensor

    @property
    def scales(self) -> Tensor:
        index = torch.arange(self.codes.numel(), device="cuda") // 256
        return self.table[self.codes.long()] * self.absmax[index] + self.offset

    @property
    def nested(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.codes, self.table, self.offset

    def moved(self, nested: bool) -> float:
        """Bytes of codes and scales."""
        blocks = self.n * self.k / BLOCKSIZE
        return self.n * self.k / 2 + blocks * (1 + 4 / 256 if nested else 4)


def random_weight(n: int, k: int) -> Random:
    """A fresh random weight on the GPU; scales near those of a trained layer."""
    blocks = n * k // BLOCKSIZE
    packed = torch.randint(0, 256, (n * k // 2, 1), dtype=torch.uint8, device="cuda")
    codes = torch.randint(0, 256, (blocks,), dtype=torch.uint8, device="cuda")
    table = torch.linspace(-1, 1, 256, device="cuda")
    absmax = torch.rand(-(-blocks // 256), device="cuda") * 0.01 + 0.01
    return Random(n, k, packed, absmax, codes, table, torch.tensor(0.05, device="cuda"))


def dequantize_rows(bench: Bench, model: str, name: str, weight: Random, bnb: Any) -> list[Row]:
    n, k = weight.n, weight.k
    written = 2 * n * k
    plain = weight.scales
    rows = []
    bench.warm_up()
    for op, absmax, nested in (("dequantize", plain, ()), ("dequantize_nested", weight.absmax, weight.nested)):
        ours = bench.time_alone(
            partial(cuda.dequantize, weight.packed, (n, k), absmax, BLOCKSIZE, torch.bfloat16, *nested)
        )
        theirs = None
        if bnb:
            state = _bnb_state(bnb, weight, plain, bool(nested))
            theirs = bench.time_alone(partial(bnb.functional.dequantize_4bit, weight.packed, state))
        tree = bench.time_alone(partial(_tree, weight, plain)) if not nested else None
        floor = bench.floor(weight.moved(bool(nested)) + written)
        rows.append(Row(op, model, name, n, k, None, ours, theirs, None, floor, tree))
    return rows


def linear_rows(bench: Bench, model: str, name: str, weight: Random, bnb: Any, tokens: tuple[int, ...]) -> list[Row]:
    n, k = weight.n, weight.k
    dense = reference.dequantize(weight.packed, (n, k), weight.absmax, BLOCKSIZE, torch.bfloat16, *weight.nested)
    rows = []
    bench.warm_up()
    for m in tokens:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        packed = (weight.packed, (n, k), weight.absmax, BLOCKSIZE)
        launches: list[Callable[[], object]] = [
            partial(cuda.linear, x, *packed, None, *weight.nested),
            partial(torch.nn.functional.linear, x, dense),
        ]
        if bnb:
            launches.append(partial(torch.ops.bitsandbytes.gemm_4bit, x, *packed, "nf4", None, *weight.nested))
        ours, bf16, *others = bench.time(*launches)
        theirs = others[0] if others else None
        floor = bench.floor(weight.moved(True) + 2 * m * (n + k), 2.0 * m * n * k)
        choice = str(cuda.plan_on(x.device, m, n, k))
        rows.append(Row("linear", model, name, n, k, m, ours, theirs, bf16, floor, None, choice))
    return rows


def _bnb_state(bnb: Any, weight: Random, plain: Tensor, nested: bool) -> Any:
    functional = bnb.functional
    code = functional.get_4bit_type("nf4", device="cuda")
    shape = torch.Size((weight.n, weight.k))
    if not nested:
        return functional.QuantState(plain, shape, code, BLOCKSIZE, "nf4", torch.bfloat16)
    second = functional.QuantState(weight.absmax, None, weight.table, 256, None, torch.float32)
    return functional.QuantState(
        weight.codes, shape, code, BLOCKSIZE, "nf4", torch.bfloat16, offset=weight.offset, state2=second
    )


def _tree(weight: Random, plain: Tensor) -> Tensor:
    out = torch.empty((weight.n, weight.k), dtype=torch.bfloat16, device="cuda")
    pointers = {"packed": weight.packed.data_ptr(), "absmax": plain.data_ptr()}
    struct = Nf4Weight(**pointers, n=weight.n, k=weight.k, blocksize=BLOCKSIZE)
    library = cuda_library.library()
    if isinstance(library, str):
        raise cuda.KernelError(library)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    count, target = ctypes.c_int64(weight.n * weight.k), ctypes.c_void_p(out.data_ptr())
    status = library.nf4_cuda_dequantize_tree(ctypes.byref(struct), count, target, stream)
    if status:
        raise cuda.KernelError(f"tree: CUDA error {status}")
    return out


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as e:
        print(f"bitsandbytes cannot be imported ({e}): its columns stay empty", file=sys.stderr)
        return None
    return bitsandbytes


def main() -> int:
    """Measure, print a line a row, write the JSON; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m nf4_kernels.bench", description="Kernel speed on this GPU.")
    parser.add_argument("--repeats", type=int, default=10, help="launches in a graph; the median of 9 replays counts")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON")
    options = parser.parse_args()
    if reason := cuda.load_error():
        print(f"nf4_kernels.bench: no CUDA kernels: {reason}", file=sys.stderr)
        return 1
    bnb = _bitsandbytes()
    bench = Bench(options.repeats)
    device = torch.cuda.get_device_name()
    copy, rate = bench.copy_bytes_per_us / 1e3, bench.flops_per_us / 1e6
    print(f"{device}: copy {copy:.0f} GB/s, bf16 matmul {rate:.0f} TFLOP/s")
    rows: list[Row] = []
    for model in options.models:
        for name, (n, k) in MODELS[model].items():
            weight = random_weight(n, k)
            found = dequantize_rows(bench, model, name, weight, bnb)
            found += linear_rows(bench, model, name, weight, bnb, tuple(options.tokens))
            for row in found:
                print(_line(row), flush=True)
            rows += found
    versions = {"torch": torch.__version__, "bitsandbytes": getattr(bnb, "__version__", None)}
    report = {
        "device": device,
        "versions": {**versions, "cuda": torch.version.cuda, "python": platform.python_version()},
        "copy_gb_s": copy,
        "matmul_tflop_s": rate,
        "rows": [asdict(row) for row in rows],
    }
    options.output.mkdir(parents=True, exist_ok=True)
    target = options.output / f"kernels-{device.replace(' ', '-').lower()}.json"
    target.write_text(json.dumps(report, indent=1) + "\n")
    print(target)
    return 0


def _line(row: Row) -> str:
    others = [("bnb", row.bnb_us), ("bf16", row.bf16_us), ("tree", row.tree_us)]
    beside = "  ".join(f"{name} {us:.1f} ({us / row.ours_us:.2f}x)" for name, us in others if us)
    where = f"{row.model} {row.shape} {row.N}x{row.K}" + ("" if row.M is None else f" M={row.M}")
    return f"{row.op} {where}: {row.ours_us:.1f} us, {row.ours_us / row.floor_us:.2f} x floor  {beside}"


if __name__ == "__main__":
    sys.exit(main())
