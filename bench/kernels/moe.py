"""python -m bench.kernels.moe: GEMMs of mixtures of experts on this machine's GPU, every launch that it can do.

Each launch's result is compared with the others' first. Times are those of clock.py (in CUDA graphs, cold L2), beside the
floor and beside torch: dequantizing as many experts as are chosen, and torch's grouped GEMM of tokens that are sorted
already, without activation or sum; and with all of it, by the operations of transformers' grouped_mm experts. The JSON is
bench/results/moe-DEVICE.json, to which the constants of nf4_kernels/plan/moe.py are fitted.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.kernels.clock import Bench
from bench.kernels.measure import BLOCKSIZE, random_weight
from bench.machine import current_commit
from nf4_kernels import Weight, cuda, reference
from nf4_kernels.cuda import moe as cuda_moe
from nf4_kernels.cuda.device import arch
from nf4_kernels.plan.moe import GROUP, MoeGrouped, MoePlan, MoeWarps, MoeWgmma, moe_candidates
from nf4_kernels.plan.moe_rows import MoeRows

RESULTS = Path(__file__).parents[1] / "results"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 300, 2048, 8192)
MANY_TOKENS = 300
"""From this many choices on, launches for few choices are left out."""
AGREEMENT = 1e-2
"""Largest distance of two launches' results, relative to their norm."""


@dataclass(frozen=True)
class Mixture:
    """Shapes of a model's experts: hidden size, intermediate size, and whether they have biases."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: str = "silu"
    biased: bool = False


MODELS = {
    "Qwen3-30B-A3B": Mixture(128, 8, 2048, 768),
    "GLM-4.7-Flash": Mixture(64, 4, 2048, 1536),
    "Gemma-4-26B-A4B": Mixture(128, 8, 2816, 704, "gelu_tanh"),
    "gpt-oss-20b": Mixture(32, 4, 2880, 2880, "swiglu_oai", biased=True),
    "Mixtral-8x7B": Mixture(8, 2, 4096, 14336),
}


@dataclass(frozen=True)
class Call:
    """One GEMM of experts with fresh random operands."""

    x: Tensor
    weight: Weight
    experts: Tensor
    bias: Tensor | None
    routing: Tensor | None
    activation: str | None

    def run(self, plan: MoePlan) -> Tensor:
        """The GEMM by that launch."""
        return cuda_moe.run(self.x, self.weight, self.experts, self.bias, self.routing, self.activation, plan)

    def flat(self, count: int) -> Weight:
        """The weights of the first `count` experts as one matrix, rows below rows."""
        _, n, k = self.weight.shape
        return Weight(self.weight.packed, (count * n, k), self.weight.absmax, BLOCKSIZE, *self.weight.nested)

    def floor(self, bench: Bench) -> float:
        """Microseconds: codes and scales of the chosen experts, activations and results; or the arithmetic."""
        (_, n, k), choices = self.weight.shape, self.experts.numel()
        chosen = int(self.experts.unique().numel())
        columns = n // 2 if self.activation else n
        results = choices * columns if self.routing is None else self.experts.shape[0] * columns
        moved = chosen * n * k * (0.5 + (1 + 4 / 256) / BLOCKSIZE) + 2 * (self.x.numel() + results)
        return bench.floor(moved, 2.0 * choices * n * k)


def experts_of(count: int, n: int, k: int) -> Weight:
    """Fresh random nested weights of `count` experts on the GPU."""
    flat = random_weight(count * n, k)
    return Weight(flat.packed, (count, n, k), flat.absmax, flat.blocksize, *flat.nested)


def random_calls(mixture: Mixture, weights: tuple[Weight, Weight], tokens: int) -> dict[str, Call]:
    """gate and up with their activation, and down with routing weights, of the same random choices."""
    scores = torch.rand(tokens, mixture.experts, device="cuda")
    experts = scores.topk(mixture.top_k, 1).indices.int()
    biases: list[Tensor | None] = [None, None]
    if mixture.biased:
        biases = [torch.randn(w.shape[:2], device="cuda", dtype=torch.bfloat16) for w in weights]
    x = torch.randn(tokens, mixture.hidden, device="cuda", dtype=torch.bfloat16)
    h = torch.randn(tokens, mixture.top_k, mixture.intermediate, device="cuda", dtype=torch.bfloat16)
    routing = torch.rand(tokens, mixture.top_k, device="cuda")
    return {
        "gate_up": Call(x, weights[0], experts, biases[0], None, mixture.activation),
        "down": Call(h, weights[1], experts, biases[1], routing, None),
    }


def sensible(plan: MoePlan, tokens: int, each: float) -> bool:
    """Whether a launch is worth its time here: groups neither much smaller nor much larger than experts' choices."""
    size = (
        plan.tokens
        if isinstance(plan, MoeWgmma | MoeGrouped)
        else GROUP
        if isinstance(plan, MoeWarps)
        else plan.tiles * 8
    )
    if isinstance(plan, MoeRows | MoeWarps) and tokens >= MANY_TOKENS:
        return False
    return each <= 6 * size and (size <= 16 or size <= 6 * each)


def torch_us(bench: Bench, call: Call) -> float:
    """Microseconds of dequantizing as many experts as are chosen and of torch's grouped GEMM."""
    _, n, k = call.weight.shape
    chosen, choices = int(call.experts.unique().numel()), call.experts.numel()
    weight = call.flat(chosen)
    ends = torch.tensor(
        [choices * (i + 1) // chosen for i in range(chosen)], dtype=torch.int32, device=call.experts.device
    )
    x = torch.randn(choices, k, device="cuda", dtype=torch.bfloat16)

    def both() -> Tensor:
        dense = cuda.dequantize(weight, torch.bfloat16).view(chosen, n, k)
        out: Tensor = functional.grouped_mm(x, dense.transpose(1, 2), offs=ends)
        return out

    return bench.time(both)[0]


def torch_layer_us(bench: Bench, call: Call) -> float:
    """Microseconds of the same result by dequantizing and by the operations of transformers' grouped_mm_experts_forward().

    As there, gate and up sort and gather tokens and leave their results sorted, and down brings the sums into the tokens'
    order. Which experts are chosen is known before.
    """
    _, n, k = call.weight.shape
    chosen, ids = call.experts.unique(return_inverse=True)
    count, top_k = len(chosen), call.experts.shape[1]
    weight = call.flat(count)
    bias = None if call.bias is None else call.bias[:count]
    routing = None if call.routing is None else call.routing.flatten()
    order = ids.flatten().argsort()
    back, given = order.argsort(), call.x.view(-1, k)

    def layer() -> Tensor:
        sorting = order if routing is not None else ids.flatten().argsort()
        own = ids.flatten()[sorting]
        ends = torch.histc(own.int(), count, 0, count - 1).cumsum(0).int()
        rows = given if routing is not None else given[sorting // top_k]
        dense = cuda.dequantize(weight, torch.bfloat16).view(count, n, k)
        out: Tensor = functional.grouped_mm(rows, dense.transpose(1, 2), offs=ends)
        if bias is not None:
            out = out + bias[own]
        if call.activation is not None:
            out = reference.gated(out, call.activation)
        if routing is None:
            return out
        out = out * routing[sorting, None].to(out.dtype)
        return out[back].view(-1, top_k, n).sum(1)

    return bench.time(layer)[0]


def measure_call(bench: Bench, call: Call, tokens: int) -> dict[str, Any]:
    """Times of every sensible launch of one GEMM. RuntimeError where two results differ."""
    (count, n, k), top_k = call.weight.shape, call.experts.shape[1]
    processors = torch.cuda.get_device_properties(call.x.device).multi_processor_count
    own, gated, routed = arch(call.x.device), call.activation is not None, call.routing is not None
    each = call.experts.numel() / int(call.experts.unique().numel())
    chosen = cuda_moe.plan_on(call.x.device, tokens, top_k, call.weight.shape, BLOCKSIZE, True, gated, routed)
    every = moe_candidates(tokens, top_k, count, n, k, own, processors, True, gated, routed)
    plans = [plan for plan in every if plan == chosen or sensible(plan, tokens, each)]
    first = call.run(plans[0]).double()
    for plan in plans[1:]:
        apart = float((call.run(plan).double() - first).norm() / first.norm())
        if not apart < AGREEMENT:
            raise RuntimeError(f"{plan} and {plans[0]} are {apart:.3g} apart")
    times = bench.time(*(partial(call.run, plan) for plan in plans))
    return {
        "floor_us": call.floor(bench),
        "torch_us": torch_us(bench, call),
        "torch_layer_us": torch_layer_us(bench, call),
        "chosen": str(chosen),
        "us": {str(plan): us for plan, us in zip(plans, times, strict=True)},
    }


def measure(models: Sequence[str], tokens: Sequence[int], repeats: int) -> dict[str, Any]:
    """The report of a run; every row is printed as soon as it is measured."""
    bench = Bench(repeats)
    rows = []
    commit = current_commit()
    for model in models:
        mixture = MODELS[model]
        weights = (
            experts_of(mixture.experts, 2 * mixture.intermediate, mixture.hidden),
            experts_of(mixture.experts, mixture.hidden, mixture.intermediate),
        )
        for count in tokens:
            bench.warm_up()
            for name, call in random_calls(mixture, weights, count).items():
                state = {"model": model, "gemm": name, "tokens": count, "commit": commit}
                row: dict[str, Any] = {**state, **measure_call(bench, call, count)}
                best = min(row["us"], key=row["us"].__getitem__)
                print(
                    f"{model} {name} {count}: {row['us'][row['chosen']]:.1f} us by {row['chosen']}, best "
                    f"{row['us'][best]:.1f} by {best}, floor {row['floor_us']:.1f}, torch {row['torch_us']:.1f}, "
                    f"with the rest of it {row['torch_layer_us']:.1f}",
                    flush=True,
                )
                rows.append(row)
    return {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()},
        "copy_gb_s": bench.copy_bytes_per_us / 1e3,
        "matmul_tflop_s": bench.flops_per_us / 1e6,
        "rows": rows,
    }


def main() -> int:
    """Measure and write the JSON; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.moe", description="Speed of experts' GEMMs.")
    parser.add_argument("--repeats", type=int, default=5, help="launches in a graph; the median of 9 replays counts")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON")
    options = parser.parse_args()
    if reason := cuda.load_error():
        print(f"bench.kernels.moe: no CUDA kernels: {reason}", file=sys.stderr)
        return 1
    report = measure(options.models, options.tokens, options.repeats)
    options.output.mkdir(parents=True, exist_ok=True)
    target = options.output / f"moe-{report['device'].replace(' ', '-').lower()}.json"
    target.write_text(json.dumps(report, indent=1) + "\n")
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
