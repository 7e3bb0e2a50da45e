"""The table of the whole engine on an H200 that poses as sm_86, from bench/results/posed-86-engine-nvidia-h200.json."""

from __future__ import annotations

from bench.tables.markdown import table
from bench.tables.results import NAMES, Result, load, peer

_POINTS = ((1, 100), (8, 100), (32, 100), (48, 100), (64, 100), (100, 100), (128, 100), (16, 4000))


def posed() -> str:
    """Decode by sequences x tokens and prefill, by model and form, under them vLLM's by Marlin on another GPU."""
    result = load("posed-86-engine-nvidia-h200.json")
    forms: dict[tuple[str, str, str], list[Result]] = {}
    for row in result["rows"]:
        forms.setdefault((row["model"], row["dtype"], row["kv"]), []).append(row)
    heads = [
        "model",
        "activations, KV cache",
        *(f"{batch} x {length}" for batch, length in _POINTS),
        "prefill 4 x 3000",
    ]
    lines = []
    for (model, dtype, kv), rows in forms.items():
        speeds = {(row["mode"], row["batch"], row["length"]): row["ours_tok_s"] for row in rows if "batch" in row}
        found = [*(speeds.get(("decode", *point)) for point in _POINTS), speeds.get(("prefill", 4, 3000))]
        form = f"{dtype}, {'16 bit' if kv == 'auto' else kv}"
        lines.append([NAMES[model], form, *("" if speed is None else f"{speed:.0f}" for speed in found)])
    marlin = [peer("H200", "vLLM", "AWQ by Marlin", "llama-3.1-8b", *point) for point in (*_POINTS, (4, 3000))]
    lines.append(
        ["Llama-3.1-8B", "vLLM, AWQ by Marlin, H200", *("" if speed is None else f"{speed:.0f}" for speed in marlin)]
    )
    return f"{result['kernels']}; commit {result['commit']}.\n\n{table(heads, lines)}"
