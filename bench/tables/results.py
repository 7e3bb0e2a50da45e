"""Results in bench/results/, and the names of models in tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
PEERS = {"H200": "peers-nvidia-h200.json", "H100": "peers-nvidia-h100.json"}
NAMES = {
    "qwen3-0.6b": "Qwen3-0.6B",
    "qwen3-4b": "Qwen3-4B",
    "qwen3-8b": "Qwen3-8B",
    "qwen3-14b": "Qwen3-14B",
    "qwen3-32b": "Qwen3-32B",
    "mistral-small-24b": "Mistral-Small-24B",
    "gemma-3-27b": "Gemma-3-27B",
    "llama-3.3-70b": "Llama-3.3-70B",
    "llama-3.1-8b": "Llama-3.1-8B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "gpt-oss-20b": "gpt-oss-20b",
    "glm-4.7-flash": "GLM-4.7-Flash",
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
    "qwen3.5-9b": "Qwen3.5-9B",
    "qwen3.5-27b": "Qwen3.5-27B",
    "qwen3.6-35b-a3b": "Qwen3.6-35B-A3B",
    "gemma-4-26b-a4b": "Gemma-4-26B-A4B",
}
Result = dict[str, Any]


def load(file: str) -> Result:
    """The contents of a file of bench/results/."""
    found: Result = json.loads((RESULTS / file).read_text())
    return found


def peer(
    gpu: str, engine: str, weights: str, model: str, batch: int, length: int | None = None, gpus: int | None = None
) -> float | None:
    """The tokens per second of another engine on that GPU, or on `gpus` of them; None where it was not measured."""
    place = {"engine": engine, "weights": weights, "model": model, "batch": batch, "length": length, "gpus": gpus}
    rows = (row for run in load(PEERS[gpu])["runs"] for row in run["rows"])
    return next((row["tok_s"] for row in rows if {key: row.get(key) for key in place} == place), None)
