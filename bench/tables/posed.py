"""The table of the whole engine on an H200 that poses: bench/results/posed-86- and posed-80-engine-nvidia-h200.json."""

from __future__ import annotations

from bench.tables.markdown import table
from bench.tables.results import NAMES, Result, load, peer

_POINTS = (*((batch, 100) for batch in (1, 8, 32, 48, 64, 100, 128)), (4, 3000))


def posed() -> str:
    """Decode by sequences x tokens and prefill, by model and choice of launches, under them vLLM's by Marlin."""
    forms: dict[tuple[str, str, str, str], list[Result]] = {}
    for arch in (86, 80):
        for row in load(f"posed-{arch}-engine-nvidia-h200.json")["rows"]:
            forms.setdefault((f"sm_{arch}", row["model"], row["launches"], row["commit"]), []).append(row)
    points = (f"{batch} x {length}" for batch, length in _POINTS[:-1])
    lines = []
    for (posed_as, model, launches, commit), rows in forms.items():
        speeds = {(row["batch"], row["length"]): row["ours_tok_s"] for row in rows if "batch" in row}
        by = f"{'fitted costs' if launches == 'fitted' else 'measured times'}, {commit}"
        lines.append([NAMES[model], posed_as, by, *_cells([speeds.get(point) for point in _POINTS])])
    marlin = [peer("H200", "vLLM", "AWQ by Marlin", "llama-3.1-8b", *point) for point in _POINTS]
    lines.append(["Llama-3.1-8B", "", "vLLM, AWQ by Marlin", *_cells(marlin)])
    return table(["model", "posed as", "launches by", *points, "prefill 4 x 3000"], lines)


def _cells(speeds: list[float | None]) -> list[str]:
    return ["" if speed is None else f"{speed:.0f}" for speed in speeds]
