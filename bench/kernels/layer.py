"""python -m bench.kernels.layer: a decode layer's launches one after another on a Hopper GPU, by the form of its attention.

Six layers of a shape with random weights and caches of their own run in a CUDA graph, as in an engine: the GEMMs with norms,
residuals and gate, and decode attention with a rotary embedding. A launch that
is quicker alone may be slower behind others, so forms of the attention are compared here; their outputs are in
tests/engine/attention/test_compiled_attention.py. Writes bench/results/layer-DEVICE.json: microseconds of a layer, medians
of 15 replays, by the number of sequences and the tokens behind each; the Triton kernel comes first and last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.busy import points_of
from bench.kernels.measure import random_weight
from bench.machine import current_commit, gpu_in_file_names, versions
from nf4_kernels import Weight, cuda
from nf4_kernels.cuda import decode_attention
from nf4_kernels.cuda.decode_attention import Instance
from server.engine.runtime.attention.base import AttentionOptions
from server.engine.runtime.attention.kernels.decode.attention import DecodeAttention
from server.engine.runtime.attention.kernels.kv_cache import Kind, LayerCache
from server.engine.runtime.attention.rotary import RotaryEmbedding
from server.engine.runtime.batch import Span, Spans

RESULTS = Path(__file__).parents[1] / "results"
POINTS = "1x300,4x300,8x2000,9x300,12x1000,16x300,16x4060,16x12060,24x300,32x2000,48x300,64x2000,100x150,200x150"
LAYERS, REPLAYS = 6, 15
BLOCK, DIM = decode_attention.BLOCK_SIZE, decode_attention.DIM


@dataclass(frozen=True)
class Shape:
    """A layer's hidden size, query heads, key heads and intermediate size."""

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int

    @property
    def weights(self) -> tuple[tuple[int, int], ...]:
        """[N, K] of queries, keys and values; of o; of gates and ups; of down."""
        width = self.heads * DIM
        return (
            (width + 2 * self.kv_heads * DIM, self.hidden),
            (self.hidden, width),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        )


MODELS = {
    "Llama-3.1-8B": Shape(4096, 32, 8, 14336),
    "Qwen3-32B": Shape(5120, 64, 8, 25600),
    "Llama-3.3-70B": Shape(8192, 64, 8, 28672),
}


class Layers:
    """LAYERS layers of a shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.kind = Kind(shape.heads, shape.kv_heads, DIM, AttentionOptions(DIM**-0.5))
        self.weights = [[random_weight(n, k) for n, k in shape.weights] for _ in range(LAYERS)]
        self.norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device="cuda")

    def run(self, x: Tensor, decode: DecodeAttention, caches: list[LayerCache], rotary: RotaryEmbedding) -> Tensor:
        """A step's hidden states [T, hidden] behind all layers; x: those in front."""
        tokens = x.shape[0]
        tiles = [self._tile(tokens, weight) for weight in self.weights[0]]
        for (qkv, o, gate_up, down), cache in zip(self.weights, caches, strict=True):
            rows = cuda.fused_linear(x, qkv, norm_weight=self.norm, norm_eps=1e-5).view(tokens, -1, DIM)
            query, key, value = rows.split((self.shape.heads, self.shape.kv_heads, self.shape.kv_heads), 1)
            attended = decode.attend(cache, query, key, value, self.kind.options, rotary, tiles[1])
            x = self._added(attended, o, x, tiles[1])
            hidden = cuda.gated_linear(
                x, gate_up, norm_weight=self.norm, norm_eps=1e-5, activation="silu", tile=tiles[3]
            )
            x = self._added(hidden, down, x, tiles[3])
        return x

    @staticmethod
    def _tile(tokens: int, weight: Weight) -> int:
        return cuda.token_tile(weight.packed.device, torch.bfloat16, tokens, weight.shape, weight.blocksize, True)

    @staticmethod
    def _added(x: Tensor, weight: Weight, residual: Tensor, tile: int) -> Tensor:
        if tile:
            return cuda.tiled_linear(x, residual.shape[0], weight, residual=residual)
        return cuda.fused_linear(x.reshape(residual.shape[0], -1), weight, residual=residual)


class Point:
    """A step of so many sequences with so many tokens behind each."""

    def __init__(self, layers: Layers, sequences: int, length: int) -> None:
        self.layers, self.sequences = layers, sequences
        self.blocks = -(-(length + 1) // BLOCK)
        device, shape = torch.device("cuda"), layers.shape
        sizes = sequences * self.blocks + 1, 2, BLOCK, shape.kv_heads, DIM
        self.caches = [LayerCache(torch.randn(sizes, dtype=torch.bfloat16, device=device), None) for _ in range(LAYERS)]
        rows = [range(row * self.blocks, (row + 1) * self.blocks) for row in range(sequences)]
        self.spans = Spans.of([Span(row, length, 1, tuple(own)) for row, own in enumerate(rows)])
        angles = torch.randn(sequences, DIM // 2, device=device).repeat(1, 2)
        self.rotary = RotaryEmbedding(angles.cos().bfloat16(), angles.sin().bfloat16())
        self.x = torch.randn(sequences, shape.hidden, dtype=torch.bfloat16, device=device)

    def measure(self, compiled: bool, instance: Instance | None = None) -> float:
        """Microseconds of a layer."""
        kind, device = self.layers.kind, self.x.device
        scratch = self.sequences * self.blocks
        decode = DecodeAttention(
            [kind], self.sequences, self.blocks, scratch, device, compiled=[kind] if compiled else []
        )
        with decode.in_form(instance):
            decode.plan(self.spans, self.sequences)
            self.layers.run(self.x, decode, self.caches, self.rotary)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.layers.run(self.x, decode, self.caches, self.rotary)
        times = []
        for _ in range(3 + REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / LAYERS)
        return float(statistics.median(times[3:]))


def row_of(layers: Layers, sequences: int, length: int, instances: list[Instance]) -> dict[str, object]:
    """A point's times by the form of its attention."""
    point = Point(layers, sequences, length)
    first = point.measure(compiled=False)
    times: dict[str, float | list[float]] = {}
    for instance in instances:
        name = f"{instance.warps} warps, {instance.stages} stages, {instance.per_processor} per multiprocessor"
        times[name] = point.measure(compiled=True, instance=instance)
    times["chosen"] = point.measure(compiled=True)
    times["Triton"] = [first, point.measure(compiled=False)]
    return {"batch": sequences, "length": length, "us": times}


def main() -> int:
    """Measure every point and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.layer", description=__doc__)
    parser.add_argument("model", nargs="?", default="Llama-3.1-8B", choices=sorted(MODELS))
    parser.add_argument(
        "--points", type=points_of, default=points_of(POINTS), help="sequences x tokens behind each, ..."
    )
    parser.add_argument("--out", type=Path, help="the file that rows go to")
    options = parser.parse_args()
    shape, device = MODELS[options.model], torch.device("cuda")
    if not decode_attention.can_attend(device, torch.bfloat16, BLOCK, shape.heads, shape.kv_heads, DIM):
        parser.error("it needs a Hopper GPU and nf4_kernels' CUDA library")
    layers = Layers(shape)
    instances = sorted(decode_attention.INSTANCES, key=lambda instance: instance.per_processor)
    rows = []
    for sequences, length in options.points:
        rows.append({"model": options.model, **row_of(layers, sequences, length, instances)})
        print(json.dumps(rows[-1]), flush=True)
    name = gpu_in_file_names()
    path = options.out or RESULTS / f"layer-{name}.json"
    state = {"device": name, "commit": current_commit(), "versions": versions()}
    path.write_text(json.dumps({**state, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
