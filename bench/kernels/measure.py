"""Measures the kernels' launches on this machine's GPU: dequantization and GEMMs of whole models' weights.

GEMMs are timed inside CUDA graphs, as a serving engine replays them; before each a kernel reads 256 MB, so that nothing of
the launch's data is in L2, and the time of these reads alone is subtracted. Dequantizations are timed as single launches
between events. The floor is the larger of the bytes that must move over the copy bandwidth and the FLOPs over the matmul
rate of the same run.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

import nf4_kernels
from bench.kernels.clock import Bench
from bench.kernels.tree import Tree
from nf4_kernels import Weight, cuda, reference
from nf4_kernels.format import block_scales

TOKENS = (
    1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 128, 144, 160, 200, 240, 256, 300, 440, 512, 700, 900, 1024, 2048, 4096
)  # fmt: skip
# (N, K) of every projection: q, k and v, o, gate and up, down; of Llama-3.1-8B joined, as the server computes them.
MODELS = {
    "Qwen3-32B": {"q": (8192, 5120), "kv": (1024, 5120), "o": (5120, 8192), "up": (25600, 5120), "down": (5120, 25600)},
    "Gemma-3-27B": {
        "q": (4096, 5376),
        "kv": (2048, 5376),
        "o": (5376, 4096),
        "up": (21504, 5376),
        "down": (5376, 21504),
    },
    "Llama-3.1-8B": {"qkv": (6144, 4096), "o": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336)},
    "Llama-3.3-70B": {"q": (8192, 8192), "kv": (1024, 8192), "up": (28672, 8192), "down": (8192, 28672)},
}
BLOCKSIZE = 64


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


def random_weight(n: int, k: int) -> Weight:
    """A fresh random nested weight on the GPU; scales near those of a trained layer."""
    blocks = n * k // BLOCKSIZE
    packed = torch.randint(0, 256, (n * k // 2, 1), dtype=torch.uint8, device="cuda")
    codes = torch.randint(0, 256, (blocks,), dtype=torch.uint8, device="cuda")
    table = torch.linspace(-1, 1, 256, device="cuda")
    absmax = torch.rand(-(-blocks // 256), device="cuda") * 0.01 + 0.01
    return Weight(packed, (n, k), absmax, BLOCKSIZE, codes, table, torch.tensor(0.05, device="cuda"))


def moved(weight: Weight) -> float:
    """Bytes of codes and scales."""
    n, k = weight.matrix
    blocks = n * k / BLOCKSIZE
    return n * k / 2 + blocks * (4 if weight.absmax_8bit is None else 1 + 4 / 256)


def dequantize_rows(bench: Bench, model: str, name: str, weight: Weight, bnb: Any, tree: Tree) -> list[Row]:
    """Rows of dequantization to bfloat16, of plain scales and of nested ones."""
    n, k = weight.matrix
    plain = Weight(weight.packed, weight.shape, block_scales(weight), BLOCKSIZE)
    rows = []
    bench.warm_up()
    for op, given in (("dequantize", plain), ("dequantize_nested", weight)):
        ours = bench.time_alone(partial(cuda.dequantize, given, torch.bfloat16))
        theirs = None
        if bnb:
            theirs = bench.time_alone(partial(bnb.functional.dequantize_4bit, given.packed, _bnb_state(bnb, given)))
        paper = bench.time_alone(partial(tree.dequantize, given)) if given is plain else None
        floor = bench.floor(moved(given) + 2 * n * k)
        rows.append(Row(op, model, name, n, k, None, ours, theirs, None, floor, paper))
    return rows


def linear_rows(bench: Bench, model: str, name: str, weight: Weight, bnb: Any, tokens: Sequence[int]) -> list[Row]:
    """A row of linear for each number of tokens."""
    n, k = weight.matrix
    dense = reference.dequantize(weight, torch.bfloat16)
    rows = []
    bench.warm_up()
    for m in tokens:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        launches: list[Callable[[], object]] = [
            partial(cuda.linear, x, weight),
            partial(torch.nn.functional.linear, x, dense),
        ]
        if bnb:
            given = weight.packed, weight.shape, weight.absmax, BLOCKSIZE
            launches.append(partial(torch.ops.bitsandbytes.gemm_4bit, x, *given, "nf4", None, *weight.nested))
        ours, bf16, *others = bench.time(*launches)
        theirs = others[0] if others else None
        floor = bench.floor(moved(weight) + 2 * m * (n + k), 2.0 * m * n * k)
        choice = str(cuda.plan_on(x.device, m, n, k))
        rows.append(Row("linear", model, name, n, k, m, ours, theirs, bf16, floor, None, choice))
    return rows


def _bnb_state(bnb: Any, weight: Weight) -> Any:
    functional = bnb.functional
    code, shape = functional.get_4bit_type("nf4", device="cuda"), torch.Size(weight.shape)
    if weight.absmax_8bit is None:
        return functional.QuantState(weight.absmax, shape, code, BLOCKSIZE, "nf4", torch.bfloat16)
    second = functional.QuantState(weight.absmax, None, weight.absmax_code, 256, None, torch.float32)
    return functional.QuantState(
        weight.absmax_8bit, shape, code, BLOCKSIZE, "nf4", torch.bfloat16, offset=weight.absmax_offset, state2=second
    )


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as e:
        print(f"bitsandbytes cannot be imported ({e}): its columns stay empty", file=sys.stderr)
        return None
    return bitsandbytes


def measure(models: Sequence[str], tokens: Sequence[int], repeats: int) -> dict[str, Any]:
    """The report of a run; a row is on standard error once it is measured. RuntimeError where the tree cannot be compiled.

    repeats: launches in a graph; the median of 9 replays counts.
    """
    bnb, tree = _bitsandbytes(), Tree()
    bench = Bench(repeats)
    device = torch.cuda.get_device_name()
    copy, rate = bench.copy_bytes_per_us / 1e3, bench.flops_per_us / 1e6
    print(f"{device}: copy {copy:.0f} GB/s, bf16 matmul {rate:.0f} TFLOP/s", file=sys.stderr)
    rows: list[Row] = []
    for model in models:
        for name, (n, k) in MODELS[model].items():
            weight = random_weight(n, k)
            found = dequantize_rows(bench, model, name, weight, bnb, tree)
            found += linear_rows(bench, model, name, weight, bnb, tokens)
            for row in found:
                print(_line(row), file=sys.stderr, flush=True)
            rows += found
    versions: dict[str, Any] = {"nf4_kernels": nf4_kernels.__version__, "torch": torch.__version__}
    versions["bitsandbytes"] = getattr(bnb, "__version__", None)
    return {
        "device": device,
        "versions": {**versions, "cuda": torch.version.cuda, "python": platform.python_version()},
        "copy_gb_s": copy,
        "matmul_tflop_s": rate,
        "rows": [asdict(row) for row in rows],
    }


def _line(row: Row) -> str:
    others = [("bnb", row.bnb_us), ("bf16", row.bf16_us), ("tree", row.tree_us)]
    beside = "  ".join(f"{name} {us:.1f} ({us / row.ours_us:.2f}x)" for name, us in others if us)
    where = f"{row.model} {row.shape} {row.N}x{row.K}" + ("" if row.M is None else f" M={row.M}")
    return f"{row.op} {where}: {row.ours_us:.1f} us, {row.ours_us / row.floor_us:.2f} x floor  {beside}"
