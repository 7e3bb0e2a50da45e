"""python -m bench.kernels.wgmma_launches: how long launches of linear_wgmma take, for bench.kernels.fit_plan.

Shapes of decoders' projections and of halves of them, each with random numbers of tokens, so that the plan is not fitted to
those that its tables show. Instances whose best launch is expected to take at most a third longer than the best are timed
in turn, each in its likeliest launches, with bfloat16 cuBLAS among them, in CUDA graphs behind a read of 256 MB. Writes
bench/results/wgmma-launches-DEVICE.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.kernels.clock import Bench
from bench.kernels.measure import random_weight
from bench.machine import current_commit, gpu_in_file_names, versions
from nf4_kernels import Weight, cuda, reference
from nf4_kernels.cuda import launches
from nf4_kernels.plan.wgmma import Wgmma, tile_count, wgmma_candidates, wgmma_cost

RESULTS = Path(__file__).parents[1] / "results"
# Those of small models and of shards have few k steps.
SHAPES = (
    (4096, 1024), (12288, 2048), (19456, 2560), (5120, 2048),
    (25600, 5120), (5120, 25600), (8192, 8192), (28672, 8192), (8192, 28672), (21504, 5376), (5376, 21504), (28672, 4096),
    (4096, 14336), (51200, 5120), (8192, 29568), (10240, 5120), (6144, 4096), (4096, 4096), (14336, 4096),
)  # fmt: skip
FEWEST, MOST = 33, 1024
SLOWER = 1.35
"""Largest expected time of an instance's best launch, relative to the best of all."""


def likely(m: int, n: int, k: int, processors: int) -> list[Wgmma]:
    """The launches to be timed: of each instance the best one, and the best of each way to divide the work.

    Without launches in which no tile is split, a fit could not tell what a launch takes from what a reduction takes.
    """
    costs = {choice: wgmma_cost(choice, m, n, k, processors) for choice in wgmma_candidates(m, n, k, processors)}
    least, found = min(costs.values()), list[Wgmma]()
    for instance in sorted({(choice.tokens, choice.groups) for choice in costs}):
        own = sorted((c for c in costs if (c.tokens, c.groups) == instance), key=lambda choice: costs[choice])
        if costs[own[0]] > SLOWER * least:
            continue
        whole = [choice for choice in own if choice.grid == tile_count(*instance, m, n)]
        split = [choice for choice in own if choice.first_split_steps]
        stream = [c for c in own if processors - 4 <= c.grid <= processors and not c.first_split_steps]
        picked = dict.fromkeys([own[0], *stream[:1], *whole[:1], *split[:1]])
        found += [choice for choice in picked if costs[choice] < 1.1 * SLOWER * least]
    return found


def time_point(bench: Bench, weight: Weight, dense: torch.Tensor, m: int, processors: int) -> list[dict[str, Any]]:
    """A row for each launch of a GEMM of m tokens; times in microseconds."""
    n, k = weight.matrix
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)

    def launch(choice: Wgmma) -> None:
        with mock.patch.object(launches, "_plan", return_value=choice):
            cuda.linear(x, weight)

    choices = likely(m, n, k, processors)
    *ours, bf16 = bench.time(
        *(partial(launch, choice) for choice in choices), partial(torch.nn.functional.linear, x, dense)
    )
    point = {"m": m, "n": n, "k": k, "bf16_microseconds": round(bf16, 2)}
    return [
        {**point, **dataclasses.asdict(choice), "microseconds": round(us, 3)}
        for choice, us in zip(choices, ours, strict=True)
    ]


def main() -> int:
    """Time all points and write the file; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.wgmma_launches", description=__doc__)
    parser.add_argument("--points", type=int, default=40, help="numbers of tokens of each shape")
    parser.add_argument("--repeats", type=int, default=8, help="launches in a graph; the median of 9 replays counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the file that rows go to")
    options = parser.parse_args()
    if reason := cuda.load_error():
        print(f"bench.kernels.wgmma_launches: no CUDA kernels: {reason}", file=sys.stderr)
        return 1
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    draw, bench, rows = random.Random(options.seed), Bench(options.repeats), list[dict[str, Any]]()
    for n, k in SHAPES:
        weight = random_weight(n, k)
        dense = reference.dequantize(weight, torch.bfloat16)
        bench.warm_up()
        for _ in range(options.points):
            # As many points from 50 to 100 tokens as from 500 to 1000.
            rows += time_point(bench, weight, dense, int(FEWEST * (MOST / FEWEST) ** draw.random()), processors)
        print(f"{n} x {k}: {len(rows)} launches", flush=True)
    state = {"device": gpu_in_file_names(), "commit": current_commit(), "versions": versions()}
    path = options.out or RESULTS / f"wgmma-launches-{gpu_in_file_names()}.json"
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    head = json.dumps({**state, "multiprocessors": processors}, indent=1)[:-2]
    path.write_text(f'{head},\n "launches": [\n{lines}\n ]\n}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
