"""Results of speculation, in bench/results/speculation-<device>.json, whose rows a later run replaces by their place."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.machine import cores, cpu_name, current_commit, gpu_in_file_names, versions

RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class Row:
    """One task at one batch size, with speculation and without, in one run."""

    model: str
    method: str
    """"lookup", or "draft" with the draft model's name where there is a draft model."""
    task: str
    """The text's name; for a drafter that errs on purpose, the share of its tokens that are right."""
    batch: int
    draft_tokens: float
    """Those of a sequence in a step that has some, mean."""
    accept_rate: float
    """Share of them that were accepted."""
    tok_s: float
    off_tok_s: float
    ratio: float
    """The median of the rounds' ratios."""
    last_ratio: float | None = None
    """The same of the time until the last sequence's answer ended, where answers are of unlike length in time."""

    @property
    def place(self) -> tuple[str, str, str, int]:
        """Key of the measurement."""
        return self.model, self.method, self.task, self.batch


def _fields(row: Row) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if value is not None}


def device_name(on_gpu: bool) -> str:
    """The device's name as it stands in the file's name."""
    return gpu_in_file_names() if on_gpu else f"cpu-{cores()}-cores"


def default_path(on_gpu: bool) -> Path:
    """The file of this machine's results."""
    return RESULTS / f"speculation-{device_name(on_gpu)}.json"


def write(path: Path, rows: list[Row], on_gpu: bool, **about: Any) -> None:
    """Put rows in a file in the places of those of the same model, method, task and batch.

    about: how these rows were measured, which each of them gets, with the commit of the code where there is a repository;
    the machine's entry is that of the newest run.
    """
    commit = current_commit()
    if commit is not None:
        about["commit"] = commit
    kept: list[dict[str, Any]] = []
    if path.exists():
        places = {row.place for row in rows}
        kept = [
            row
            for row in json.loads(path.read_text())["rows"]
            if (row["model"], row["method"], row["task"], row["batch"]) not in places
        ]
    machine = {"device": torch.cuda.get_device_name() if on_gpu else cpu_name(), "cores": cores(), **versions()}
    found = {"machine": machine, "rows": kept + [_fields(row) | about for row in rows]}
    path.write_text(json.dumps(found, indent=1) + "\n")
