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
    """One large projection at every M, and dequantize, from the kernel benchmark."""
    rows = result["rows"]
    largest = max((r["N"] * r["K"] for r in rows if r["shape"].startswith("qwen3-32b")), default=0)
    chosen = [r for r in rows if r["N"] * r["K"] == largest and r["shape"].startswith("qwen3-32b")]
    n, k = (chosen[0]["N"], chosen[0]["K"]) if chosen else (0, 0)
    lines = [
        f"{result['device']}, N={n} K={k}, microseconds (times the floor); {_versions(result)}.",
        "",
        "| | ours | bitsandbytes | bf16 cuBLAS | floor |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in (r for r in chosen if (r["N"], r["K"]) == (n, k)):
        name = f"M = {row['M']}" if row["op"] == "linear" else row["op"].replace("_", ", ")
        ours = f"{row['ours_us']:.1f} ({row['ours_us'] / row['floor_us']:.2f})"
        lines.append(
            f"| {name} | {ours} | {_us(row.get('bnb_us'))} | {_us(row.get('bf16_us'))} | {row['floor_us']:.1f} |"
        )
    return "\n".join(lines)


def e2e(result: Result) -> str:
    """Decode and prefill of whole models on dummy weights."""
    lines = [
        f"{result['device']}, dummy weights, tokens per second; {_versions(result)}.",
        "",
        "| model | what | ours | transformers generate + bitsandbytes | generate_batch |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        if row["mode"] not in ("decode", "prefill"):
            continue
        what = (
            f"decode, batch {row['batch']}" if row["mode"] == "decode" else f"prefill {row['batch']} x {row['length']}"
        )
        theirs = (row.get(f"{peer}_tok_s") for peer in ("hf_generate", "hf_generate_batch"))
        cells = " | ".join("" if value is None else f"{value:.1f}" for value in theirs)
        lines.append(f"| {row['model']} | {what} | {row['ours_tok_s']:.0f} | {cells} |")
    return "\n".join(lines)


TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "cpu": ("cpu.json", cpu),
    "kernels": ("kernels-nvidia-h200.json", kernels),
    "e2e": ("e2e-nvidia-h200.json", e2e),
}


def rendered(text: str) -> str:
    """text with every marked table made anew. KeyError for a table that is not known."""

    def table(match: re.Match[str]) -> str:
        file, render = TABLES[match["name"]]
        return f"{match[1]}{render(json.loads((RESULTS / file).read_text()))}\n{match[3]}"

    return MARKED.sub(table, text)


def _versions(result: Result) -> str:
    return ", ".join(f"{name} {version}" for name, version in result["versions"].items())


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


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
