"""Plot bench/results/{kernels,e2e,speculation}-*.json as PNGs in docs/: python -m bench.plot [FILE ...] (extra "plots").

One picture shows the time of a linear layer over the floor by the number of tokens, for the large projections of three
models; one shows tokens per second of whole models by the number of sequences; and one what speculation gains.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from bench.kernels.tables import large_rows
from bench.speculation.tables import name_of, text_rows
from bench.tables.results import RESULTS

DOCS = RESULTS.parents[1] / "docs"
SHOWN = ("kernels-nvidia-h200.json", "e2e-nvidia-h200.json", "speculation-nvidia-h100.json")
"""The results whose pictures docs/ shows."""
SERIES = (
    ("ours_us", "nf4_kernels", "tab:blue"),
    ("bf16_us", "bf16 cuBLAS", "tab:green"),
    ("bnb_us", "bitsandbytes", "tab:red"),
)
ENGINES = (
    ("ours_tok_s", "nf4-server", "tab:blue"),
    ("hf_generate_batch_tok_s", "transformers generate_batch + bitsandbytes", "tab:orange"),
    ("hf_generate_tok_s", "transformers generate + bitsandbytes", "tab:red"),
)


def plot_engines(report: dict[str, Any], target: Path) -> None:
    """Write the PNG of tokens per second in decode steps, a panel a model."""
    rows = [r for r in report["rows"] if r["mode"] == "decode"]
    models = sorted({r["model"] for r in rows})
    figure, axes = plt.subplots(1, len(models), figsize=(13, 3.6), sharex=True, sharey=True, squeeze=False)
    for axis, model in zip(axes.flat, models, strict=True):
        chosen = sorted((r for r in rows if r["model"] == model), key=lambda r: r["batch"])
        for key, name, color in ENGINES:
            points = [(r["batch"], r[key]) for r in chosen if r.get(key)]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, color=color, label=name)
        _scale(axis, model, [1, 8, 32, 128])
    figure.supxlabel("sequences", y=0.1, fontsize=10)
    figure.supylabel("tokens per second", fontsize=10)
    figure.suptitle(f"Decoding with random NF4 weights on {report['device']}, 128 tokens in and out", fontsize=11)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="lower center", ncols=len(ENGINES), frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(target, dpi=110)


def plot_kernels(report: dict[str, Any], target: Path) -> None:
    """Write the PNG of linear layers, a panel a projection."""
    rows = [row for row in large_rows(report) if row["op"] == "linear"]
    shapes = sorted({(r["model"], r["N"], r["K"]) for r in rows})
    figure, axes = plt.subplots(2, -(-len(shapes) // 2), figsize=(13, 6), sharex=True, sharey=True)
    for axis, (model, n, k) in zip(axes.flat, shapes, strict=False):
        chosen = sorted((r for r in rows if (r["model"], r["N"], r["K"]) == (model, n, k)), key=lambda r: r["M"])
        for key, name, color in SERIES:
            points = [(r["M"], r[key] / r["floor_us"]) for r in chosen if r.get(key)]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, color=color, label=name)
        axis.axhline(1, color="gray", linewidth=0.8)
        _scale(axis, f"{model}, {n} x {k}", [4**i for i in range(7)])
        axis.set_yticks([1, 2, 4, 8, 16], labels=["1", "2", "4", "8", "16"])
    for axis in axes.flat[len(shapes) :]:
        axis.axis("off")
        axis.legend(*axes.flat[0].get_legend_handles_labels(), loc="center", frameon=False)
    figure.supxlabel("tokens")
    figure.supylabel("time over the floor")
    figure.suptitle(f"NF4 linear layers on {report['device']}", fontsize=11)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def plot_speculation(report: dict[str, Any], target: Path) -> None:
    """Write the PNG of the speed with speculation over that without, by the number of sequences, a panel a model."""
    rows = text_rows(report)
    models = list(dict.fromkeys(map(name_of, rows)))
    methods, tasks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("method", "task"))
    figure, axes = plt.subplots(
        1, len(models), figsize=(max(7.5, 4.5 * len(models)), 5.4), sharey=True, squeeze=False, layout="constrained"
    )
    colors, named = mpl.color_sequences["tab10"], dict[str, Any]()
    for axis, model in zip(axes.flat, models, strict=True):
        chosen = [row for row in rows if name_of(row) == model]
        for method, task in dict.fromkeys((row["method"], row["task"]) for row in chosen):
            points = sorted((r["batch"], r["ratio"]) for r in chosen if (r["method"], r["task"]) == (method, task))
            style = ("-", "--", ":", "-.")[methods.index(method) % 4]
            color = colors[tasks.index(task) % len(colors)]
            (named[f"{method}: {task}"],) = axis.plot(
                *zip(*points, strict=True), marker="o", markersize=4, color=color, linestyle=style
            )
        axis.axhline(1, color="gray", linewidth=0.8)
        axis.set_title(model, fontsize=9)
        axis.set_xscale("log", base=2)
        batches = sorted({row["batch"] for row in chosen})
        axis.set_xticks(batches, labels=[str(batch) for batch in batches])
        axis.set_xlabel("sequences")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.supylabel("times as fast as without", fontsize=10)
    figure.suptitle(f"Speculation on {report['machine']['device']}", fontsize=11)
    figure.savefig(target, dpi=110)


def _scale(axis: Any, title: str, ticks: list[int]) -> None:
    """Make both axes logarithmic, with these ticks on x."""
    axis.set_title(title, fontsize=9)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axis.set_yscale("log")
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def main() -> int:
    """Plot the files given, or those whose pictures docs/ shows; returns the exit status."""
    mpl.use("Agg")
    plots = {"kernels": plot_kernels, "e2e": plot_engines, "speculation": plot_speculation}
    for source in map(Path, sys.argv[1:] or map(RESULTS.joinpath, SHOWN)):
        target = DOCS / source.with_suffix(".png").name
        plot = plots[source.name.partition("-")[0]]
        plot(json.loads(source.read_text()), target)
        print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
