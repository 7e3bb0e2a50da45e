"""Plots bench/results/kernels-*.json and e2e-*.json: python -m bench.plot [FILE ...]; PNGs go into docs/. Extra "plots".

Time of a linear layer over the floor, by the number of tokens, for the large projections of three models; tokens per
second of whole models, by the number of sequences.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from bench.kernels.tables import LARGE
from bench.readme import RESULTS, ROOT

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
    rows = [r for r in report["rows"] if r["op"] == "linear" and r["N"] * r["K"] >= LARGE]
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


def _scale(axis: Any, title: str, ticks: list[int]) -> None:
    """Logarithmic both ways, ticks along x."""
    axis.set_title(title, fontsize=9)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axis.set_yscale("log")
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def main() -> int:
    """Plot the files given, or the H200's; returns the exit status."""
    mpl.use("Agg")
    for source in map(Path, sys.argv[1:] or (RESULTS / f"{name}-nvidia-h200.json" for name in ("kernels", "e2e"))):
        target = ROOT / "docs" / source.with_suffix(".png").name
        draw = plot_engines if source.name.startswith("e2e-") else plot_kernels
        draw(json.loads(source.read_text()), target)
        print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
