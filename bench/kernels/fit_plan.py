"""Fits the costs of linear_wgmma's launches, nf4_kernels/plan/wgmma.py's WGMMA_COSTS, to measured ones.

    python -m bench.kernels.fit_plan FILE

FILE: {"multiprocessors": 132, "launches": [{"m": 64, "n": 8192, "k": 8192, "tokens": 64, "groups": 2, "grid": 128,
"first_split_steps": 17, "microseconds": 41.5}, ...]}; the fields from tokens on are those of a Wgmma plan. Prints the
table as Python, with the rms of the relative errors and the number of launches behind each instance.

The cost of a launch is linear in its instance's costs, but for a maximum of two sums. So the costs are found by least
squares of relative errors, none of them negative, repeated until the larger sum of each launch stays the larger one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nf4_kernels.plan.wgmma import Wgmma, WgmmaCosts, wgmma_cost

NAMES = tuple(field.name for field in dataclasses.fields(WgmmaCosts))
# The costs with which the fit begins; only which of two sums is larger depends on them. A k step costs more, the more tokens
# it has.
_START = WgmmaCosts(5.0, 1.0, 0.05, 2.0, 4.0, 0.5, 0.01)
_ROUNDS = 50
_STEP = 1e-4


@dataclasses.dataclass(frozen=True)
class Launch:
    """A measured launch of linear_wgmma."""

    m: int
    n: int
    k: int
    plan: Wgmma
    microseconds: float

    def cost(self, costs: WgmmaCosts, multiprocessors: int) -> float:
        """Time by the model, in microseconds."""
        return wgmma_cost(self.plan, self.m, self.n, self.k, multiprocessors, costs)


@dataclasses.dataclass(frozen=True)
class Fit:
    """The costs of an instance; rms: the root of the mean square of relative errors."""

    costs: WgmmaCosts
    rms: float
    launches: int


def launches_of(report: dict[str, Any]) -> list[Launch]:
    """The launches of a file. ValueError names the first that is none."""
    found = []
    for index, row in enumerate(report["launches"]):
        try:
            m, n, k = (int(row[name]) for name in ("m", "n", "k"))
            plan = Wgmma(*(int(row[name]) for name in ("tokens", "groups", "grid", "first_split_steps")))
            found.append(Launch(m, n, k, plan, float(row["microseconds"])))
        except (KeyError, TypeError, ValueError) as e:
            raise ValueError(f"launch {index} is not one: {e!r}") from e
        if not (math.isfinite(found[-1].microseconds) and found[-1].microseconds > 0):
            raise ValueError(f"launch {index} takes {found[-1].microseconds} microseconds")
    return found


def fit(launches: Iterable[Launch], multiprocessors: int) -> dict[tuple[int, int], Fit]:
    """Fit the costs of each instance (tokens, groups) that launches has."""
    groups: dict[tuple[int, int], list[Launch]] = defaultdict(list)
    for launch in launches:
        groups[launch.plan.tokens, launch.plan.groups].append(launch)
    return {instance: _fit_instance(given, multiprocessors) for instance, given in sorted(groups.items())}


def _fit_instance(launches: Sequence[Launch], multiprocessors: int) -> Fit:
    costs = _START
    seen: set[WgmmaCosts] = set()
    best = Fit(costs, math.inf, len(launches))
    for _ in range(_ROUNDS):
        terms = torch.tensor([_terms(launch, costs, multiprocessors) for launch in launches], dtype=torch.float64)
        measured = torch.tensor([launch.microseconds for launch in launches], dtype=torch.float64)
        solved = _least_squares(terms / measured[:, None], torch.ones_like(measured))
        costs = WgmmaCosts(*(round(value, 9) for value in solved.tolist()))
        errors = [launch.cost(costs, multiprocessors) / launch.microseconds - 1 for launch in launches]
        rms = math.sqrt(sum(error * error for error in errors) / len(errors))
        if rms < best.rms:
            best = Fit(costs, rms, len(launches))
        if costs in seen:
            break
        seen.add(costs)
    return best


def _terms(launch: Launch, costs: WgmmaCosts, multiprocessors: int) -> list[float]:
    """Number of times that each cost is in the launch's: the slopes of the model, which is linear around these costs."""
    here = launch.cost(costs, multiprocessors)
    slopes = []
    for name in NAMES:
        there = dataclasses.replace(costs, **{name: getattr(costs, name) + _STEP})
        slopes.append((launch.cost(there, multiprocessors) - here) / _STEP)
    return slopes


def _least_squares(terms: Tensor, wanted: Tensor) -> Tensor:
    """The x >= 0 with the smallest |terms x - wanted|. Costs that no launch depends on are 0. (Lawson and Hanson.)"""
    count = terms.shape[1]
    sizes = terms.norm(dim=0)
    scaled = terms / torch.where(sizes > 1e-9, sizes, torch.inf)
    x, used = torch.zeros(count, dtype=terms.dtype), torch.zeros(count, dtype=torch.bool)
    for _ in range(10 * count):
        gain = torch.where(used, -torch.inf, scaled.T @ (wanted - scaled @ x))
        if float(gain.max()) <= 1e-9:
            break
        used[gain.argmax()] = True
        while True:
            tried = torch.zeros_like(x)
            tried[used] = torch.linalg.lstsq(scaled[:, used], wanted[:, None], driver="gelsd").solution[:, 0]
            negative = used & (tried <= 0)
            if not negative.any():
                break
            share = (x[negative] / (x[negative] - tried[negative])).min()
            x = x + share * (tried - x)
            used &= x > 1e-12
        x = tried
    return x / torch.where(sizes > 1e-9, sizes, torch.inf)


def table(fits: dict[tuple[int, int], Fit]) -> str:
    """WGMMA_COSTS as Python."""
    lines = ["WGMMA_COSTS = {"]
    for instance, found in fits.items():
        values = ", ".join(f"{value:.4g}" for value in dataclasses.astuple(found.costs))
        comment = f"  # rms {found.rms:.1%} of {found.launches} launches"
        lines.append(f"    {instance}: WgmmaCosts({values}),{comment}")
    return "\n".join([*lines, "}"])


def main() -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels.fit_plan", description="Fit the plan's costs to launches."
    )
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    try:
        report = json.loads(options.file.read_text())
        fits = fit(launches_of(report), int(report["multiprocessors"]))
    except (OSError, ValueError, KeyError, TypeError) as e:
        print(f"bench.kernels.fit_plan: {options.file}: {e}", file=sys.stderr)
        return 1
    print(table(fits))
    return 0


if __name__ == "__main__":
    sys.exit(main())
