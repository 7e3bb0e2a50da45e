"""Fits the costs of moe_wgmma's launches, nf4_kernels/plan/moe.py's H200_COSTS: python -m bench.kernels.fit_moe_plan.

It reads bench/results/moe-nvidia-h200.json, in which `bench.kernels.moe` wrote every launch's time. A random search changes
constants a little and keeps what lowers a loss of two parts: by how much the launches that the costs choose are slower than
the best ones, and the squared relative errors of the costs. It prints the constants as Python.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from bench.kernels.moe import MODELS, RESULTS
from nf4_kernels.plan import moe
from nf4_kernels.plan.moe import MoeWgmma, MoeWgmmaCosts, moe_candidates, moe_wgmma_cost

LEAST_CHOICES = 4
"""Choices of an expert, on average, from which moe_wgmma may be the fastest kernel."""
ROUNDS, STEP = 5000, 0.08
MULTIPROCESSORS = 132
"""Those of an H200."""


@dataclass(frozen=True)
class Gemm:
    """Experts' weights [n, k], how many choices there are, of how many experts, and the microseconds of each launch."""

    choices: int
    chosen: float
    n: int
    k: int
    launches: list[tuple[MoeWgmma, float]]

    def loss(self, costs: MoeWgmmaCosts) -> tuple[float, float]:
        """Slowdown of the chosen launch against the best one; the mean square of the costs' relative errors."""
        found = [moe_wgmma_cost(plan, self.choices, self.chosen, self.n, self.k, costs) for plan, _ in self.launches]
        taken = [us for _, us in self.launches]
        errors = [math.log(cost / us) ** 2 for cost, us in zip(found, taken, strict=True)]
        return taken[found.index(min(found))] / min(taken) - 1, sum(errors) / len(errors)


def gemms(report: dict[str, list[dict[str, object]]]) -> list[Gemm]:
    """The GEMMs of a report that have several launches of moe_wgmma."""
    found = []
    for row in report["rows"]:
        mixture, tokens, times = MODELS[str(row["model"])], row["tokens"], row["us"]
        assert isinstance(tokens, int)
        assert isinstance(times, dict)
        choices = tokens * mixture.top_k
        chosen = moe.expected_experts(choices, mixture.experts)
        n, k = mixture.hidden, mixture.intermediate
        if gated := row["gemm"] == "gate_up":
            n, k = 2 * k, n
        plans = moe_candidates(tokens, mixture.top_k, mixture.experts, n, k, 90, MULTIPROCESSORS, True, gated)
        launches = [(plan, times[str(plan)]) for plan in plans if isinstance(plan, MoeWgmma) and str(plan) in times]
        if choices / chosen >= LEAST_CHOICES and len(launches) > 1:
            found.append(Gemm(choices, chosen, n, k, launches))
    return found


def fit(measured: Sequence[Gemm], seed: int = 0, rounds: int = ROUNDS) -> MoeWgmmaCosts:
    """The constants with the smallest loss that the search finds, beginning with those of the library."""
    chance = random.Random(seed)

    def total(costs: MoeWgmmaCosts) -> float:
        losses = [gemm.loss(costs) for gemm in measured]
        worst = max(slower for slower, _ in losses)
        return 5 * sum(slower for slower, _ in losses) + 2 * worst + 4 * sum(error for _, error in losses) / len(losses)

    best = moe.H200_COSTS
    least = total(best)
    for _ in range(rounds):
        numbers = list(astuple(best))
        for place in chance.sample(range(len(numbers)), chance.choice((1, 2, 3))):
            numbers[place] *= math.exp(chance.gauss(0, STEP))
        tried = MoeWgmmaCosts(*numbers)
        if (loss := total(tried)) < least:
            best, least = tried, loss
    return best


def main() -> int:
    """Print the constants and what they choose."""
    measured = gemms(json.loads((RESULTS / "moe-nvidia-h200.json").read_text()))
    for name, costs in (("before", moe.H200_COSTS), ("fitted", fit(measured))):
        losses = [gemm.loss(costs) for gemm in measured]
        slower, errors = [loss for loss, _ in losses], [error for _, error in losses]
        mean, rms = sum(slower) / len(slower), math.sqrt(sum(errors) / len(errors))
        print(
            f"{name}: chosen launches of {len(measured)} GEMMs are slower than the best by {mean:.1%}, at most "
            f"{max(slower):.1%}; relative errors of the costs {rms:.1%}\n{costs}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
