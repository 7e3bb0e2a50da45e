"""The file that the rows of a run are written to, bench/results/e2e-<device>.json."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
import transformers

BESIDE = ("hf_generate", "weights_gib", "again_s")
"""Prefixes of the columns that not every run measures."""
Row = dict[str, Any]


def write(path: Path, device: str, rows: list[Row], commit: str | None = None) -> None:
    """Write rows, and keep those of the file that were not measured again.

    A row that was measured again keeps transformers' speeds of the earlier run where this run has none. commit is the state
    of the code that rows are of.
    """
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    state = {} if commit is None else {"commit": commit}
    earlier = {identity(row): row for row in kept}
    rows = [_with_earlier({**row, **state}, earlier.get(identity(row), {})) for row in rows]
    measured = {identity(row) for row in rows}
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "bitsandbytes": bitsandbytes.__version__,
        "python": platform.python_version(),
    }
    rows = sorted([*(row for row in kept if identity(row) not in measured), *rows], key=identity)
    path.write_text(json.dumps({"device": device, "versions": versions, "rows": rows}, indent=1) + "\n")


def _with_earlier(row: Row, earlier: Row) -> Row:
    """row with transformers' speeds and the weights' size from earlier where it has none, and our speed beside them."""
    kept = "weights_gib" if "hf_generate_tok_s" in row else BESIDE
    missing = {key: value for key, value in earlier.items() if key.startswith(kept) and key not in row}
    if "hf_generate_tok_s" in missing:
        missing["ours_beside_hf_tok_s"] = earlier.get("ours_beside_hf_tok_s", earlier["ours_tok_s"])
    return {**row, **missing}


def identity(row: Row) -> tuple[str, str, float, float, float, float]:
    """Key of a row: model, mode, batch, length, rate and number of GPUs, 0 where it has none."""
    return row["model"], row["mode"], *(row.get(name, 0) for name in ("batch", "length", "rate", "tp"))
