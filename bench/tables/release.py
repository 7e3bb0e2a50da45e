"""The table of the newest state that was measured as a whole, from bench/results/written-layers-nvidia-h100.json."""

from __future__ import annotations

from bench.tables.markdown import table
from bench.tables.results import NAMES, load

STATES = {"llama-3.1-8b": "one-backend", "qwen3-30b-a3b": "written"}
"""By model, the tag of its rows."""
PLACES = ((1, 100), (5, 100), (8, 100), (48, 100), (100, 100), (256, 100), (16, 4000))


def release() -> str:
    """Decode by sequences x tokens, prefill and start of two models."""
    rows = load("written-layers-nvidia-h100.json")["rows"]
    heads = ["model", *(f"{batch} x {length}" for batch, length in PLACES), "prefill 4 x 3000", "start, s"]
    lines = []
    for model, tag in STATES.items():
        found = [row for row in rows if (row["model"], row["tag"]) == (model, tag)]
        speeds = {(row["mode"], row["batch"], row["length"]): row["tok_s"] for row in found if row["mode"] != "start"}
        cells = [speeds.get(("decode", *place)) for place in PLACES] + [speeds.get(("prefill", 4, 3000))]
        ready = next(row["ready_s"] for row in found if row["mode"] == "start")
        lines.append([NAMES[model], *("" if cell is None else f"{cell:.0f}" for cell in cells), f"{ready:.0f}"])
    return table(heads, lines)
