"""Tables of bench/results/kernels-*.json, and the targets of large projections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

LARGE = 64_000_000  # weights


@dataclass(frozen=True)
class Target:
    """The target of a large projection: at most this many times the floor, at least this many times faster than others."""

    floor: float | None = None
    bnb: float | None = None
    bf16: float | None = None
    tree: float | None = None

    def missed(self, row: dict[str, Any]) -> Iterator[str]:
        """The names of the targets that a row misses."""
        if self.floor is not None and row["ours_us"] > self.floor * row["floor_us"]:
            yield f"{self.floor} x floor"
        for title, key, least in (
            ("bitsandbytes", "bnb_us", self.bnb),
            ("bf16", "bf16_us", self.bf16),
            ("tree", "tree_us", self.tree),
        ):
            if least is not None and row.get(key) and row[key] < least * row["ours_us"]:
                yield f"{least} x {title}"


DEQUANTIZE = Target(floor=1.12, bnb=1.5, tree=3.3)
LINEAR = {
    1: Target(floor=1.5, bnb=2.5),
    2: Target(floor=1.7, bf16=2.5),
    **dict.fromkeys((4, 8, 16), Target(floor=1.7, bnb=4, bf16=2.5)),
    32: Target(floor=2.0, bf16=2),
    64: Target(floor=2.0, bf16=1.7),
    128: Target(floor=1.6, bf16=1.1),
    **dict.fromkeys((96, 144, 160, 200, 240, 300, 440, 700, 900), Target(bf16=0.9)),
    **dict.fromkeys((256, 512), Target(bf16=0.95)),
    **dict.fromkeys((2048, 4096), Target(bnb=1.03, bf16=0.93)),
}


def large_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that are of projections with many weights."""
    return [row for row in report["rows"] if row["N"] * row["K"] >= LARGE]


def large(report: dict[str, Any]) -> str:
    """Markdown: over all large projections and for each M, the range of the ratios, and how many miss which target."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in large_rows(report):
        name = f"M = {row['M']}" if row["op"] == "linear" else row["op"].replace("_", ", ")
        groups.setdefault(name, []).append(row)
    lines = [
        "| | times the floor | faster than bitsandbytes | than bf16 cuBLAS | target missed by |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, rows in sorted(groups.items(), key=lambda item: item[1][0]["M"] or 0):
        target = LINEAR.get(rows[0]["M"], Target()) if rows[0]["op"] == "linear" else DEQUANTIZE
        missed: dict[str, int] = {}
        for what in (what for row in rows for what in target.missed(row)):
            missed[what] = missed.get(what, 0) + 1
        cells = [
            _span([r["ours_us"] / r["floor_us"] for r in rows]),
            *(_span([r[key] / r["ours_us"] for r in rows if r.get(key)]) for key in ("bnb_us", "bf16_us")),
            ", ".join(f"{what}: {count} of {len(rows)}" for what, count in missed.items()),
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if values else ""


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


def experts_rows(report: dict[str, Any]) -> str:
    """Markdown: the launches that the plan chooses for experts' GEMMs, beside the floor and torch."""
    lines = [
        "| model | GEMM | tokens | ours, us | times the floor | torch / ours | its GEMM alone | commit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        us = row["us"][row["chosen"]]
        name = "gate and up" if row["gemm"] == "gate_up" else "down"
        cells = (
            row["model"],
            name,
            row["tokens"],
            f"{us:.1f}",
            f"{us / row['floor_us']:.1f}",
            f"{row['torch_layer_us'] / us:.2f}",
            f"{row['torch_us'] / us:.2f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} | {row['commit']} |")
    return "\n".join(lines)
