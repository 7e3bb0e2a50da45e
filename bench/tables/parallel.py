"""Markdown of bench/results/tp-*.json and exchange-*.json: several GPUs beside one, and what their exchange takes."""

from __future__ import annotations

from bench.tables.markdown import table
from bench.tables.results import NAMES, Result, load, peer

DEVICE = "nvidia-h100-80gb-hbm3"
PROMPT = 128
"""Tokens of a prompt in decode."""
_RESIDUAL_KIB = (2, 16, 80, 160, 320, 640, 1280, 2048, 5120, 7680)
_PROTOCOLS = ("nccl_us", "ll_us", "ll128_us")


def several_gpus() -> str:
    """Decode and prefill of one GPU and of two in one run, and vLLM with AWQ on two."""
    result = load(f"tp-{DEVICE}.json")
    lines = []
    for row in _speeds(result, gpus=2):
        one = next(other for other in result["rows"] if _place(other) == _place(row) and other["tp"] == 1)
        vllm = peer("H100", "vLLM", "AWQ", row["model"], row["batch"], row.get("length", PROMPT), row["tp"])
        lines.append(
            [
                NAMES[row["model"]],
                row["mode"],
                _shape(row),
                f"{one['tok_s']:.0f}",
                f"{row['tok_s']:.0f}",
                f"{row['tok_s'] / one['tok_s']:.2f}",
                "" if vllm is None else f"{vllm:.0f}",
                row["commit"],
            ]
        )
    heads = ["model", "mode", "sequences", "one GPU", "two GPUs", "times", "vLLM AWQ, two GPUs", "commit"]
    return f"{result['device']}, tokens per second.\n\n{table(heads, lines)}"


def four_gpus() -> str:
    """Decode and prefill of one, two and four GPUs of a host."""
    result = load(f"tp-4-gpus-{DEVICE}.json")
    lines = []
    for row in _speeds(result, gpus=4):
        alike = {other["tp"]: other["tok_s"] for other in result["rows"] if _place(other) == _place(row)}
        speeds = [f"{alike[gpus]:.0f}" for gpus in (1, 2, 4)]
        times = [f"{alike[gpus] / alike[1]:.2f}" for gpus in (2, 4)]
        lines.append([NAMES[row["model"]], row["mode"], _shape(row), *speeds, *times, row["commit"]])
    heads = ["model", "mode", "sequences", "one GPU", "two", "four", "two, times", "four, times", "commit"]
    return f"{result['device']}, tokens per second.\n\n{table(heads, lines)}"


def gpu_starts() -> str:
    """Memory of rank 0 and the seconds until the engine is ready, by model and number of GPUs."""
    lines = [
        [
            NAMES[row["model"]],
            str(row["tp"]),
            f"{row['nf4_weights_gib']:.1f}",
            f"{row['kv_gib']:.0f}",
            f"{row['reserved_gib']:.1f}",
            f"{row['ready_s']:.0f}",
        ]
        for row in load(f"tp-{DEVICE}.json")["rows"]
        if row["mode"] == "start"
    ]
    return table(["model", "GPUs", "NF4 weights a GPU, GiB", "KV cache a GPU", "reserved", "start, s"], lines)


def exchange() -> str:
    """Microseconds of a sum with its residual, by NCCL and by one launch of ours."""
    result = load(f"exchange-{DEVICE}.json")
    rows = [row for row in result["rows"] if row["residual"] and row["kib"] in _RESIDUAL_KIB]
    lines = [[str(row["kib"]), *(f"{row[name]:.1f}" if name in row else "" for name in _PROTOCOLS)] for row in rows]
    heads = ["KiB", "NCCL and an addition", "ours, LL", "ours, LL128"]
    return f"{result['device']}, {rows[0]['ranks']} GPUs, microseconds in a CUDA graph.\n\n{table(heads, lines)}"


def _speeds(result: Result, gpus: int) -> list[Result]:
    """The rows of decode and prefill on so many GPUs."""
    return [row for row in result["rows"] if row.get("tp") == gpus and row["mode"] in ("decode", "prefill")]


def _shape(row: Result) -> str:
    """A row's sequences, with the length of prompts."""
    return str(row["batch"]) if row["mode"] == "decode" else f"{row['batch']} x {row['length']}"


def _place(row: Result) -> tuple[object, ...]:
    return tuple(row.get(name) for name in ("model", "mode", "batch", "length"))
