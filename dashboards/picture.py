"""Draw a dashboard with matplotlib from Prometheus' answers, each panel where Grafana has it."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.dates import AutoDateLocator, DateFormatter

from dashboards.prometheus import Prometheus
from dashboards.queries import fill, variables_of

CELL = 0.32
"""Inches of one grid unit upwards; a column is 0.75 wide."""
PERCENT = 100
_UNITS = {"s": "s", "reqps": "1/s", "bytes": "GiB", "percentunit": "%"}
_SCALE = {"bytes": 2**-30, "percentunit": PERCENT}


def draw(prometheus: Prometheus, board: dict[str, Any], target: Path, minutes: float) -> None:
    """Write a PNG of all panels over the last minutes."""
    mpl.use("Agg")
    step = max(1.0, 60 * minutes / 150)
    values = variables_of(board) | {"__rate_interval": "30s"}
    bottom = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in board["panels"])
    figure = plt.figure(figsize=(24 * 0.75, bottom * CELL), facecolor="#f4f5f5")
    for panel in board["panels"]:
        place = panel["gridPos"]
        left, top = place["x"] / 24, 1 - place["y"] / bottom
        if panel["type"] == "row":
            figure.text(left + 0.005, top - 0.7 / bottom, panel["title"], fontsize=12, weight="bold")
            continue
        series = [
            (target_["legendFormat"], labels, points)
            for target_ in panel["targets"]
            for labels, points in prometheus.range(fill(target_["expr"], values), minutes, step)
        ]
        width, height = place["w"] / 24, place["h"] / bottom
        inner = (left + 0.035, top - height * 0.86, width - 0.045, height * 0.70)
        axis = figure.add_axes(inner)
        axis.set_title(panel["title"], fontsize=9, loc="left")
        {"stat": _number, "heatmap": _heat, "timeseries": _lines}[panel["type"]](axis, panel, series)
    figure.savefig(target, dpi=75)
    plt.close(figure)


def _unit(panel: dict[str, Any]) -> str:
    return str(panel["fieldConfig"]["defaults"].get("unit", ""))


def _moments(points: list[Any]) -> list[datetime]:
    return [datetime.fromtimestamp(float(moment), UTC) for moment, _ in points]


def _number(axis: Any, panel: dict[str, Any], series: list[Any]) -> None:
    unit = _unit(panel)
    axis.axis("off")
    text = "no data"
    known = [float(v) for _, v in series[0][2] if not math.isnan(float(v))] if series else []
    if known:
        value = known[-1]
        scaled = f"{value * _SCALE.get(unit, 1):.3g} {_UNITS.get(unit, '')}"
        text = ("on" if value else "off") if unit == "bool_on_off" else scaled
    axis.text(0.5, 0.4, text, ha="center", va="center", fontsize=22, color="#1f77b4")


def _lines(axis: Any, panel: dict[str, Any], series: list[Any]) -> None:
    unit = _unit(panel)
    for legend, labels, points in series:
        name = legend
        for key, value in labels.items():
            name = name.replace("{{" + key + "}}", value)
        axis.plot(_moments(points), [float(v) * _SCALE.get(unit, 1) for _, v in points], linewidth=1.2, label=name)
    axis.set_ylim(bottom=0)
    axis.set_ylabel(_UNITS.get(unit, ""), fontsize=7)
    _finish(axis)
    if series:
        axis.legend(fontsize=6, loc="upper left", framealpha=0.6)


def _heat(axis: Any, panel: dict[str, Any], series: list[Any]) -> None:
    """Cumulative buckets over time, as the observations in each."""
    buckets = sorted((float(labels["le"]), points) for _, labels, points in series)
    if not buckets:
        return
    moments = _moments(buckets[0][1])
    rows, below = [], [0.0] * len(moments)
    for _, points in buckets:
        counts = [0.0 if math.isnan(float(v)) else float(v) for _, v in points]
        rows.append([max(0.0, c - b) for c, b in zip(counts, below, strict=True)])
        below = counts
    used = [i for i, row in enumerate(rows) if any(row)] or [0]
    first, last = max(0, used[0] - 1), min(len(rows) - 1, used[-1] + 1)
    axis.pcolormesh(moments, range(first, last + 1), rows[first : last + 1], cmap="Oranges", shading="nearest")
    ticks = range(first, last + 1, max(1, (last - first) // 6))
    axis.set_yticks(list(ticks), labels=[f"{buckets[i][0]:g}" for i in ticks])
    _finish(axis)


def _finish(axis: Any) -> None:
    axis.xaxis.set_major_formatter(DateFormatter("%H:%M:%S"))
    axis.tick_params(labelsize=6)
    axis.xaxis.set_major_locator(AutoDateLocator(minticks=2, maxticks=5))
    axis.grid(alpha=0.3)
