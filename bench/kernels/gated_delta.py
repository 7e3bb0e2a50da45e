"""python -m bench.kernels.gated_delta: the gated delta rule on this machine's GPU, decode steps and prompts.

Steps are timed in CUDA graphs that go through so many layers that no state is in L2 when its turn comes; the floor is the
time in which their states are copied. fla's fused_recurrent_gated_delta_rule computes the rule alone: no convolution, gates
or norm. Prompts are timed in graphs, too, and launched one after the other.
The JSON is bench/results/gated-delta-DEVICE.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.machine import current_commit, gpu_in_file_names
from nf4_kernels import gated_delta
from nf4_kernels.gated_delta_params import GatedDelta, Sequences
from server.engine.runtime.layers.stateful import delta_chunks
from server.engine.runtime.layers.stateful.delta_chunks import max_tokens
from server.engine.runtime.layers.stateful.pieces import cut

RESULTS = Path(__file__).parents[1] / "results"
MODELS = {"Qwen3.5-27B": (16, 48), "Qwen3.5-9B": (16, 32)}
"""Key heads and value heads, of 128."""
SEQUENCES = (1, 8, 32, 128)
PROMPTS = ((1, 2048), (8, 2048), (1, 8192))
SHORT_PROMPTS = ((1, 32), (1, 64), (1, 128), (1, 256), (8, 64), (8, 256))
DIM = 128
_STATES_BYTES = 400 << 20


@dataclass(frozen=True)
class Row:
    """One measurement; microseconds a layer."""

    model: str
    sequences: int
    tokens: int
    us: float
    floor_us: float | None = None
    fla_us: float | None = None
    token_by_token_us: float | None = None
    launched_us: float | None = None
    live_mib: float | None = None
    """Of the tensors beside arguments and result."""


def layer(heads: tuple[int, int], tokens: int, slots: int, state_dtype: torch.dtype = torch.float32) -> GatedDelta:
    """A layer with random parameters, states and inputs, which are views of one joined GEMM's result."""
    key_heads, value_heads = heads
    channels, values = (2 * key_heads + value_heads) * DIM, value_heads * DIM
    widths = [channels, values, value_heads, value_heads]

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    qkv, z, a, b = normal(tokens, sum(widths)).split(widths, dim=-1)
    a_log = torch.rand(value_heads, device="cuda").mul(16).log()
    parameters = (normal(channels, 4) / 2, a_log, normal(value_heads, dtype=torch.float32), normal(DIM).abs())
    state = normal(slots, value_heads, DIM, DIM, dtype=torch.float32).to(state_dtype)
    return GatedDelta(qkv, z, a, b, *parameters, 1e-6, normal(slots, channels, 3), state, key_heads)


def replayed(launch: Callable[[], object], repeats: int = 15) -> float:
    """Median microseconds of a CUDA graph of launch."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            launch()
        taken: list[float] = []
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            taken.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(taken)


def launched(launch: Callable[[], object], repeats: int = 10) -> float:
    """Microseconds of a launch among several without a graph."""
    launch()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        launch()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats * 1e6


def step_rows(model: str, sequences: int, copy_bytes_per_us: float, state_dtype: torch.dtype) -> Row:
    """A decode step of so many sequences; slots in random order."""
    bytes_ = sequences * MODELS[model][1] * DIM * DIM * (4 if state_dtype is torch.float32 else 2)
    count = max(4, -(-_STATES_BYTES // bytes_))
    layers = [layer(MODELS[model], sequences, sequences, state_dtype) for _ in range(count)]
    slots = torch.randperm(sequences, device="cuda").int()

    def ours() -> None:
        for p in layers:
            gated_delta.run(p, Sequences(slots))

    floor = 2 * bytes_ / copy_bytes_per_us
    fla = None if state_dtype is not torch.float32 else _fla_step(layers) / count
    return Row(model, sequences, 1, replayed(ours) / count, floor, fla)


def _fla_step(layers: Sequence[GatedDelta]) -> float:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    def given(p: GatedDelta) -> dict[str, Tensor]:
        keys = p.num_key_heads * DIM
        q, k, v = p.qkv.contiguous().split([keys, keys, p.num_value_heads * DIM], dim=-1)
        parts = {"q": q, "k": k, "v": v}
        heads = {name: x.contiguous().view(len(x), 1, -1, DIM) for name, x in parts.items()}
        return {**heads, "g": -p.a.float().abs()[:, None], "beta": p.b.float().sigmoid()[:, None]}

    inputs = [given(p) for p in layers]

    def theirs() -> None:
        for p, x in zip(layers, inputs, strict=True):
            fused_recurrent_gated_delta_rule(
                **x, initial_state=p.state, output_final_state=True, use_qk_l2norm_in_kernel=True
            )

    return replayed(theirs)


def prompt_row(model: str, sequences: int, tokens: int) -> Row:
    """Prompts of one length through fla and from token to token."""
    p = layer(MODELS[model], sequences * tokens, sequences)
    slots = torch.arange(sequences, dtype=torch.int32, device="cuda")
    has_state = torch.zeros(sequences, dtype=torch.bool, device="cuda")
    at = cut(max_tokens(p), [tokens] * sequences, slots, has_state)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * tokens

    def by_fla() -> None:
        delta_chunks.chunks(p, at)

    def by_tokens() -> None:
        gated_delta.run(p, Sequences(slots, starts, has_state))

    by_fla()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    by_fla()
    live = (torch.cuda.max_memory_allocated() - before - p.z.numel() * p.z.element_size()) / 2**20
    return Row(
        model,
        sequences,
        tokens,
        replayed(by_fla, 5),
        token_by_token_us=replayed(by_tokens, 3),
        launched_us=launched(by_fla),
        live_mib=round(live, 1),
    )


def first_call() -> float:
    """Seconds of the first call of fla in this process, imports and compilation included."""
    p = layer(MODELS["Qwen3.5-27B"], 100, 1)
    slots, has_state = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.ones(1, dtype=torch.bool, device="cuda")
    began = time.perf_counter()
    delta_chunks.chunks(p, cut(max_tokens(p), [100], slots, has_state))
    torch.cuda.synchronize()
    return time.perf_counter() - began


def copy_rate() -> float:
    """Bytes a microsecond that a copy reads and writes."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    return 2 * a.numel() / replayed(lambda: b.copy_(a))


def measure() -> dict[str, Any]:
    """The report."""
    compiled = first_call()
    rate = copy_rate()
    steps = [step_rows(model, n, rate, torch.float32) for model in MODELS for n in SEQUENCES]
    narrow = [step_rows("Qwen3.5-27B", n, rate, torch.bfloat16) for n in SEQUENCES]
    prompts = [prompt_row("Qwen3.5-27B", *shape) for shape in (*PROMPTS, *SHORT_PROMPTS)]
    return {
        "device": torch.cuda.get_device_name(),
        "commit": current_commit(),
        "versions": {name: version(name) for name in ("torch", "triton", "fla-core")},
        "copy_gb_s": round(rate / 1e3, 1),
        "first_call_s": round(compiled, 2),
        **{
            name: [{key: _rounded(value) for key, value in asdict(row).items() if value is not None} for row in rows]
            for name, rows in (("steps", steps), ("steps_bfloat16_state", narrow), ("prompts", prompts))
        },
    }


def _rounded(value: object) -> object:
    return round(value, 1) if isinstance(value, float) else value


def main() -> int:
    """Measure and write the JSON; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.gated_delta", description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available() or not delta_chunks.has_fla():
        print("bench.kernels.gated_delta: needs a GPU and fla-core", file=sys.stderr)
        return 1
    report = measure()
    options.output.mkdir(parents=True, exist_ok=True)
    target = options.output / f"gated-delta-{gpu_in_file_names()}.json"
    target.write_text(json.dumps(report, indent=1) + "\n")
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
