"""A choice by times that were measured on this GPU. The fitted costs rank what was not measured: launches, token counts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

from nf4_kernels.plan import Plan
from nf4_kernels.plan.dequantize import Dequantize

TOKENS = (1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
"""The numbers of tokens that are measured: where instances begin and end, and some between."""
_INSTANCES = 4
"""Instances of a kernel that are timed, each in its launch with the least fitted cost."""
_CLEARLY = 1.02
"""By how much a launch must be slower than the fastest to give way: measurements repeat within 1 to 2 %."""

Times = Mapping[int, Mapping[str, float]]
"""Microseconds of a weight's launches by their str(), by the number of tokens."""
Options = Iterable[tuple[Plan, float]]
"""Launches and their fitted costs."""


def shape_name(n: int, k: int, blocksize: int, nested: bool) -> str:
    """Name of a weight [n, k] in measured times."""
    return f"{n} x {k}, {'nested ' if nested else ''}blocks of {blocksize}"


def shortlist(options: Options) -> list[Plan]:
    """The launches to time: of each kernel's likeliest instances the likeliest one."""
    found: dict[type, dict[tuple[object, ...], Plan]] = {}
    for launch, _ in sorted(options, key=lambda option: option[1]):
        found.setdefault(type(launch), {}).setdefault(_instance(launch), launch)
    return [launch for own in found.values() for launch in list(own.values())[:_INSTANCES]]


def measured_choice(m: int, times: Times, options_of: Callable[[int], Options]) -> Plan:
    """The fastest of options_of(m), by what was measured with m tokens or the next larger number.

    A launch takes as many times its fitted cost as its instance did there; one whose instance was not measured, such as a
    tile that fits m alone, as many times as the fastest of its kernel. In the order of fitted costs the first is taken that
    is not clearly slower than the fastest, and not slower than dequantization + cuBLAS.
    """
    options = sorted(options_of(m), key=lambda option: option[1])
    at = min((tokens for tokens in times if tokens >= m), default=None)
    if at is None or len(options) == 1:
        return options[0][0]
    timed = [(times[at][str(launch)], launch, cost) for launch, cost in options_of(at) if str(launch) in times[at]]
    ratios: dict[object, float] = {}
    for us, launch, cost in sorted(timed, key=lambda one: -one[0]):
        # The fastest of a kernel comes last, and stays.
        ratios[_instance(launch)] = ratios[type(launch)] = us / cost
    costs = {
        launch: cost * ratios.get(_instance(launch), ratios.get(type(launch), math.inf)) for launch, cost in options
    }
    dequantized = min((cost for launch, cost in costs.items() if isinstance(launch, Dequantize)), default=math.inf)
    most = min(_CLEARLY * min(costs.values()), dequantized)
    return next((launch for launch, cost in costs.items() if cost <= most), options[0][0])


def _instance(launch: Plan) -> tuple[object, ...]:
    """Compiled instance of a launch: its kernel, and the fields that come first."""
    return type(launch), *dataclasses.astuple(launch)[:2]
