"""The README's kernel table from bench/results/kernels-*.json: python -m bench.kernels FILE [--op linear] [--model NAME]."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def table(report: dict[str, Any], op: str, model: str | None) -> str:
    """Markdown: a row a shape (and M), ours and the others in microseconds with their ratio to ours, and the floor."""
    rows = [row for row in report["rows"] if row["op"] == op and model in (None, row["model"])]
    if not rows:
        raise ValueError(f"no rows of op {op!r}" + (f" and model {model!r}" if model else ""))
    columns = [("bnb_us", "bitsandbytes"), ("bf16_us", "bf16"), ("tree_us", "0.47-style tree")]
    columns = [(key, title) for key, title in columns if any(row.get(key) for row in rows)]
    header = [
        "model",
        "layer",
        "N x K",
        *(["M"] if op == "linear" else []),
        "ours",
        "x floor",
        *(t for _, t in columns),
    ]
    lines = [" | ".join(header), " | ".join("---" for _ in header)]
    for row in rows:
        cells = [row["model"], row["shape"], f"{row['N']} x {row['K']}"]
        if op == "linear":
            cells.append(str(row["M"]))
        cells += [f"{row['ours_us']:.1f}", f"{row['ours_us'] / row['floor_us']:.2f}"]
        for key, _ in columns:
            other = row.get(key)
            cells.append(f"{other:.1f} ({other / row['ours_us']:.2f}x)" if other else "")
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description="Markdown of a kernel benchmark.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--op", default="linear", choices=["linear", "dequantize", "dequantize_nested"])
    parser.add_argument("--model")
    options = parser.parse_args()
    report = json.loads(options.file.read_text())
    try:
        text = table(report, options.op, options.model)
    except ValueError as e:
        print(f"bench.kernels: {e}", file=sys.stderr)
        return 1
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    print(
        f"{report['device']}: copy {report['copy_gb_s']:.0f} GB/s, matmul {report['matmul_tflop_s']:.0f} TFLOP/s; {versions}"
    )
    print()
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
