"""A load as a picture: how its latencies are distributed, and how they went over time. Needs the extra "plots"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from bench.load.client import Answer


def plot_load(answers: Sequence[Answer], title: str, target: Path, slo: tuple[float | None, float | None]) -> None:
    """Write a PNG; slo are the limits of the first token and of the mean time per later token, in seconds, or None."""
    mpl.use("Agg")
    done = [a for a in answers if a.ok and a.chunks]
    start = min((a.sent for a in answers), default=0.0)
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.5))
    first = [a.chunks[0] - a.sent for a in done]
    gaps = [later - earlier for a in done for earlier, later in zip(a.chunks, a.chunks[1:], strict=False)]
    whole = [a.ended - a.sent for a in done]
    names = ("time to first token", "time between pieces", "whole request")
    for axis, name, values, limit in zip(axes[0], names, (first, gaps, whole), (*slo, None), strict=True):
        _distribution(axis, name, values, limit)
    sent = [a.sent - start for a in done]
    _points(axes[1][0], "time to first token", sent, first)
    _points(axes[1][1], "whole request", sent, whole)
    _throughput(axes[1][2], done, start)
    failed = [a.sent - start for a in answers if not a.ok]
    for moment in failed:
        axes[1][1].axvline(moment, color="tab:red", linewidth=0.6, alpha=0.5)
    figure.suptitle(f"{title}: {len(done)} of {len(answers)} answered", fontsize=11)
    figure.tight_layout()
    figure.savefig(target, dpi=100)
    plt.close(figure)


def _distribution(axis: Any, name: str, values: list[float], limit: float | None) -> None:
    ordered = sorted(values)
    axis.plot(ordered, [100 * (i + 1) / len(ordered) for i in range(len(ordered))])
    if limit is not None:
        axis.axvline(limit, color="tab:red", linewidth=0.8, label="objective")
        axis.legend(fontsize=8)
    axis.set_title(name, fontsize=9)
    axis.set_xlabel("s")
    axis.set_ylabel("% of them are at most")
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)


def _points(axis: Any, name: str, moments: list[float], values: list[float]) -> None:
    axis.plot(moments, values, ".", markersize=4)
    axis.set_title(f"{name}, by when it was sent", fontsize=9)
    axis.set_xlabel("s since the start")
    axis.set_ylabel("s")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def _throughput(axis: Any, done: Sequence[Answer], start: float) -> None:
    """Pieces of text in each of 40 intervals."""
    moments = [moment - start for a in done for moment in a.chunks]
    axis.hist(moments, bins=40, weights=[40 / max(moments)] * len(moments) if moments else None)
    axis.set_title("pieces of text per second", fontsize=9)
    axis.set_xlabel("s since the start")
    axis.grid(alpha=0.3)
