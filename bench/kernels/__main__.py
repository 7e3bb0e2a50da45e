"""python -m bench.kernels: the kernels beside bitsandbytes, bfloat16 cuBLAS and the floor, on this machine's GPU.

Everything in one run, into bench/results/kernels-DEVICE.json, or with --json to standard output; measure.py says how. The
table of an existing file: python -m bench.kernels --table FILE [--op linear] [--model NAME].
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench.kernels.measure import MODELS, TOKENS, measure
from bench.kernels.tables import table
from nf4_kernels import cuda

RESULTS = Path(__file__).parents[1] / "results"


def print_table(file: Path, op: str, model: str | None) -> int:
    """Print a report's table as Markdown; returns the exit status."""
    try:
        report = json.loads(file.read_text())
        text = table(report, op, model)
    except (OSError, ValueError) as e:
        print(f"bench.kernels: {e}", file=sys.stderr)
        return 1
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    speeds = f"copy {report['copy_gb_s']:.0f} GB/s, matmul {report['matmul_tflop_s']:.0f} TFLOP/s"
    print(f"{report['device']}: {speeds}; {versions}\n\n{text}")
    return 0


def main() -> int:
    """Measure and write the JSON, or print a table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description="Kernel speed on this GPU.")
    parser.add_argument("--repeats", type=int, default=10, help="launches in a graph; the median of 9 replays counts")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print this report as Markdown, and measure nothing")
    parser.add_argument(
        "--op", default="linear", choices=["linear", "dequantize", "dequantize_nested"], help="of --table"
    )
    parser.add_argument("--model", help="of --table: this model's rows alone")
    parser.add_argument("--json", action="store_true", help="print the JSON, and write no file")
    options = parser.parse_args()
    if options.table:
        return print_table(options.table, options.op, options.model)
    if reason := cuda.load_error():
        print(f"bench.kernels: no CUDA kernels: {reason}", file=sys.stderr)
        return 1
    try:
        report = measure(options.models, options.tokens, options.repeats)
    except RuntimeError as e:
        print(f"bench.kernels: {e}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(report, indent=1))
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    target = options.output / f"kernels-{report['device'].replace(' ', '-').lower()}.json"
    target.write_text(json.dumps(report, indent=1) + "\n")
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
