"""Makes the README's tables from bench/results/: python -m bench.readme [--check].

A table stands between <!-- table:NAME --> and <!-- /table -->. --check writes nothing and fails when one is out of date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.kernels.tables import LARGE, large

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
README = ROOT / "README.md"
MARKED = re.compile(r"(<!-- table:(?P<name>[a-z0-9-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
Result = dict[str, Any]


def cpu(result: Result) -> str:
    """Engine on CPU beside transformers."""
    lines = [
        f"{result['device']}, {result['threads']} threads, tokens per second; {_versions(result)}.",
        "",
        "| | ours | transformers + bitsandbytes NF4 | transformers bf16 |",
        "| --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        theirs = f"{row['transformers_bnb_nf4']:.0f} ({row['transformers_bnb_dtype']})"
        lines.append(f"| {row['what']} | {row['ours']:.0f} | {theirs} | {row['transformers_bf16']:.0f} |")
    return "\n".join(lines)


def kernels(result: Result) -> str:
    """A projection of Qwen3-32B at every M, from the kernel benchmark; then all large ones beside their targets."""
    rows = [r for r in result["rows"] if (r["model"], r["shape"]) == ("Qwen3-32B", "up")]
    lines = [
        f"{result['device']}, {rows[0]['N']} x {rows[0]['K']}, nested scales, microseconds (ours: times the floor; others: "
        f"times ours); {_versions(result)}.",
        "",
        "| | ours | bitsandbytes | bf16 cuBLAS | floor |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        name = f"M = {row['M']}" if row["op"] == "linear" else row["op"].replace("_", ", ")
        ours = f"{row['ours_us']:.1f} ({row['ours_us'] / row['floor_us']:.2f})"
        others = " | ".join(_us(row.get(key), row["ours_us"]) for key in ("bnb_us", "bf16_us"))
        lines.append(f"| {name} | {ours} | {others} | {row['floor_us']:.1f} |")
    count = len({(r["N"], r["K"]) for r in result["rows"] if r["N"] * r["K"] >= LARGE})
    about = f"All {count} projections of three models with {LARGE // 1_000_000}M weights and more, beside what was aimed at:"
    return "\n".join([*lines, "", about, "", large(result)])


def e2e(result: Result) -> str:
    """Whole models on dummy weights: decode and prefill beside transformers, then the server over HTTP."""
    rows = [row for row in result["rows"] if row["mode"] in ("decode", "prefill")]
    invariant = {(r["model"], r["batch"]): r for r in result["rows"] if r["mode"] == "decode_batch_invariant"}
    heads = ["model", "what", "ours", *["batch_invariant"] * bool(invariant), "transformers generate + bitsandbytes"]
    heads.append("generate_batch")
    lines = [
        f"{result['device']}, dummy weights, tokens per second; {_versions(result)}.",
        "",
        _cells(heads),
        _cells(["---"] * len(heads)),
    ]
    for row in rows:
        decodes = row["mode"] == "decode"
        what = f"decode, batch {row['batch']}" if decodes else f"prefill {row['batch']} x {row['length']}"
        fixed = invariant.get((row["model"], row["batch"])) if decodes else None
        times = f" ({_times(row):.1f}x)" if row.get("hf_generate_tok_s") else ""
        cells = [row["model"], what, f"{row['ours_tok_s']:.0f}{times}"]
        cells += [_speed(fixed and fixed["ours_tok_s"])] * bool(invariant)
        lines.append(
            _cells([*cells, *(_speed(row.get(f"{peer}_tok_s")) for peer in ("hf_generate", "hf_generate_batch"))])
        )
    return "\n".join(lines)


# At their best, beside bitsandbytes 0.47.0 on an A100; in the order in which the paper names its models.
PAPER = {"gemma-3-27b": 1.54, "qwen3-32b": 1.29, "llama-3.3-70b": 1.32}


def paper(result: Result) -> str:
    """End to end, in times of transformers with bitsandbytes: the paper's kernels and this engine."""
    rows = {(r["model"], r["batch"]): r for r in result["rows"] if r["mode"] == "decode" and r.get("hf_generate_tok_s")}
    lines = [
        "| times transformers' generate with bitsandbytes | the paper's kernels, 0.47.0, A100 | ours, 0.50.2, batch 1"
        " | batch 32 |",
        "| --- | --- | --- | --- |",
    ]
    for model, theirs in PAPER.items():
        lines.append(_cells([model, f"{theirs:.2f}", *(f"{_times(rows[model, batch]):.1f}" for batch in (1, 32))]))
    return "\n".join(lines)


def http(result: Result) -> str:
    """The real server under load, as its clients see it."""
    lines = [
        f"{result['device']}, dummy weights, 128 tokens in and 128 out, streamed; times in milliseconds.",
        "",
        "| model | load | tokens per second | the engine alone | TTFT median, p99 | ITL median, p99 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in (row for row in result["rows"] if row["mode"] == "http"):
        load = f"{row['batch']} clients" if "batch" in row else f"{row['rate']:g} requests per second"
        alone = row.get("direct_tok_s")
        share = f"{alone:.0f} ({row['ours_tok_s'] / alone:.0%} of it)" if alone else ""
        times = " | ".join(f"{row[k]['p50'] * 1e3:.0f}, {row[k]['p99'] * 1e3:.0f}" for k in ("ttft_s", "itl_s"))
        lines.append(f"| {row['model']} | {load} | {row['ours_tok_s']:.0f} | {share} | {times} |")
    return "\n".join(lines)


def fidelity(result: Result) -> str:
    """Errors of log-probabilities and memory, of whole models."""
    lines = [
        "| model | error of log-probabilities, root mean square: ours | transformers in bfloat16 | memory beside weights"
        " and KV cache, GiB | weights, GiB | ready after, s | the server after that, s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    starts = {row["model"]: row for row in result["rows"] if row["mode"] == "start"}
    for row in (row for row in result["rows"] if row["mode"] == "fidelity"):
        start = starts[row["model"]]
        beside = start["allocated_gib"] - start["weights_gib"] - start["kv_gib"]
        weights = start["weights_gib"]
        again = f"{start['again_s']:.0f}" if "again_s" in start else ""
        lines.append(
            f"| {row['model']} | {row['ours_rms']:.4f} | {row['hf_rms']:.4f} | {beside:.2f} ({beside / weights:.1%})"
            f" | {weights:.1f} | {start['ready_s']:.0f} | {again} |"
        )
    return "\n".join(lines)


TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "cpu": ("cpu.json", cpu),
    "kernels": ("kernels-nvidia-h200.json", kernels),
    "e2e": ("e2e-nvidia-h200.json", e2e),
    "paper": ("e2e-nvidia-h200.json", paper),
    "http": ("e2e-nvidia-h200.json", http),
    "fidelity": ("e2e-nvidia-h200.json", fidelity),
}


def rendered(text: str) -> str:
    """text with every marked table made anew. KeyError for a table that is not known."""

    def table(match: re.Match[str]) -> str:
        file, render = TABLES[match["name"]]
        return f"{match[1]}{render(json.loads((RESULTS / file).read_text()))}\n{match[3]}"

    return MARKED.sub(table, text)


def _versions(result: Result) -> str:
    return ", ".join(f"{name} {version}" for name, version in result["versions"].items())


def _times(row: Result) -> float:
    """Our speed in times of transformers', in the run that had both."""
    return float(row.get("ours_beside_hf_tok_s", row["ours_tok_s"]) / row["hf_generate_tok_s"])


def _cells(texts: list[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _speed(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _us(value: float | None, ours: float) -> str:
    return "" if value is None else f"{value:.1f} ({value / ours:.2f})"


def main() -> int:
    """Rewrite the README's tables, or with --check say whether they are up to date."""
    text = README.read_text()
    made = rendered(text)
    if "--check" not in sys.argv[1:]:
        README.write_text(made)
        return 0
    if made != text:
        print("README.md: its tables are not what bench/results/ says; run `python -m bench.readme`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
