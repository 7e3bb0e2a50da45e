"""The tables of speculation in docs/lab/performance.md, from bench/results/speculation-<device>.json."""

from __future__ import annotations

import re
from typing import Any

from bench.tables.markdown import table, wrapped
from bench.tables.results import NAMES, load

FILE, H200_FILE = "speculation-nvidia-h100.json", "speculation-nvidia-h200.json"
CPU_FILE = "speculation-cpu-2-cores.json"
HEADS = (
    "model",
    "proposer",
    "text",
    "sequences",
    "draft tokens",
    "accepted",
    "tokens/s",
    "without",
    "times as fast",
    "commit",
)
_STEP = re.compile(r"(\d+) draft tokens behind (\d+) tokens, none right")
"""The task of a row that is of a step's time; see bench.speculation.drafter."""
Result = dict[str, Any]


def name_of(row: Result) -> str:
    """The model's name as people write it."""
    name = str(row["model"])
    return NAMES.get(name, name)


def text_rows(found: Result) -> list[Result]:
    """The rows whose tokens per second count, in the order of the file."""
    return [row for row in found["rows"] if not _STEP.fullmatch(row["task"])]


def speculation(file: str = FILE) -> str:
    """A row for each model, proposer, share of right draft tokens and batch; times are medians of rounds, no quotients."""
    found = load(file)
    lines = [_cells(row) for row in text_rows(found) if "last_ratio" not in row]
    return f"{wrapped(_machine(found))}\n\n{table(HEADS, lines)}"


def speculation_texts(file: str = FILE) -> str:
    """The same of real texts, and how much sooner the last answer of a batch has ended."""
    found = load(file)
    lines = [_cells(row) for row in text_rows(found) if "last_ratio" in row]
    return f"{wrapped(_machine(found))}\n\n{table([*HEADS[:-1], 'until the last', HEADS[-1]], lines)}"


def _cells(row: Result) -> list[str]:
    drafts = (f"{row['draft_tokens']:.1f}", f"{row['accept_rate']:.2f}") if row["draft_tokens"] else ("0", "")
    speeds = f"{row['tok_s']:.1f}", f"{row['off_tok_s']:.1f}", f"**{row['ratio']:.2f}**"
    last = [f"{row['last_ratio']:.2f}"] if "last_ratio" in row else []
    return [
        name_of(row),
        row["method"],
        row["task"].replace("of draft tokens right", "right"),
        str(row["batch"]),
        *drafts,
        *speeds,
        *last,
        row.get("commit", ""),
    ]


def speculation_steps(file: str = FILE) -> str:
    """A row for each model and length of context: the time of a step without draft tokens, and with some."""
    found = load(file)
    steps: dict[tuple[str, int], dict[int, Result]] = {}
    for row in found["rows"]:
        if match := _STEP.fullmatch(row["task"]):
            steps.setdefault((name_of(row), int(match[2])), {})[int(match[1])] = row
    counts = sorted({count for own in steps.values() for count in own})
    lines = []
    for (name, context), own in steps.items():
        cells = [
            f"{1e3 / own[count]['tok_s']:.2f} ({1 / own[count]['ratio']:.2f})" if count in own else ""
            for count in counts
        ]
        # One row's figure: the step without draft tokens was measured once for all of them.
        first = next(iter(own.values()))
        lines.append([name, str(context), f"{1e3 / first['off_tok_s']:.2f}", *cells, first.get("commit", "")])
    heads = ["model", "tokens before", "no draft token", *(f"{count} draft tokens" for count in counts), "commit"]
    return table(heads, lines)


def _machine(found: Result) -> str:
    machine = dict(found["machine"])
    # What nf4_kernels has for the processor says nothing of a GPU.
    device, _, _ = machine.pop("device"), machine.pop("cores"), machine.pop("nf4_kernels", None)
    return f"{device}; {', '.join(f'{name} {version}' for name, version in machine.items())}."
