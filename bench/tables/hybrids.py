"""Tables of models with states, from bench/results/hybrids-nvidia-h200.json: throughput, first tokens behind a history."""

from __future__ import annotations

from bench.tables.markdown import table
from bench.tables.results import NAMES, Result, load

_FILE = "hybrids-nvidia-h200.json"
_SPEEDS = (("decode", 1, None), ("decode", 8, None), ("decode", 32, None), ("decode", 128, None))
_PROMPTS = (("prefill", 1, 2048), ("prefill", 8, 2048))


def hybrids() -> str:
    """By model: decode tokens per second by sequences, and prompt tokens per second."""
    columns = (*_SPEEDS, *_PROMPTS)
    heads = [
        "model",
        *(f"{batch}" if length is None else f"{batch} x {length}" for _, batch, length in columns),
        "commit",
    ]
    found = {
        (row["model"], row["commit"], (row["mode"], row["batch"], row.get("length"))): row["tok_s"]
        for row in load(_FILE)["rows"]
        if row["mode"] in ("decode", "prefill")
    }
    models = dict.fromkeys((model, commit) for model, commit, _ in found)
    return table(
        heads,
        (
            [NAMES[model], *(_number(found.get((model, commit, column))) for column in columns), commit]
            for model, commit in models
        ),
    )


def first_tokens() -> str:
    """By model: ms to the first token by new tokens, alone and behind a history."""
    rows: list[Result] = [row for row in load(_FILE)["rows"] if row["mode"] == "first token"]
    lengths = sorted({row["new"] for row in rows})
    found = {(row["model"], row["commit"], row["new"]): row for row in rows}
    models = dict.fromkeys((row["model"], row["commit"]) for row in rows)
    return table(
        ["model", *(f"{new} new tokens" for new in lengths), "commit"],
        (
            [NAMES[model], *(_pair(found.get((model, commit, new))) for new in lengths), commit]
            for model, commit in models
        ),
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _pair(row: Result | None) -> str:
    if row is None:
        return ""
    alone, behind = row["alone"], row["behind 30000"]
    return f"{alone * 1e3:.0f} / {behind * 1e3:.0f} ({behind / alone:.2f} x)"
