"""The table of mixtures by the bytes of weights that a step reads, from bench/results/mixtures-<device>.json."""

from __future__ import annotations

import json
from typing import Any

from bench.tables.markdown import table
from bench.tables.results import NAMES, RESULTS, Result, load

FILE = "mixtures-nvidia-h200.json"
_DECODE = (1, 8, 32, 128)
_OTHERS = {("decode after 2500", 8): "8 x 2500", ("prefill", 8): "prefill 8 x 2048"}
_NF4 = 0.5 + (1 + 4 / 256) / 64
"""Bytes of a weight in blocks of 64, its scales nested."""
_GLOBAL_EVERY = 6
"""Of Gemma 4's layers each sixth has no window."""


def mixtures() -> str:
    """By model: tokens per second by sequences x tokens of each prompt, and a decode step's time per byte of weights.

    The times are compared with the first model's.
    """
    result = load(FILE)
    columns = [*(("decode", batch) for batch in _DECODE), *_OTHERS]
    heads = ["model", *(_OTHERS.get(column, f"{column[1]} x 128") for column in columns), "time per byte"]
    names = list(dict.fromkeys(row["model"] for row in result["rows"]))
    lines = []
    for name in names:
        speeds = {(row["mode"], row["batch"]): row["tok_s"] for row in result["rows"] if row["model"] == name}
        shown = (f"{speeds[column]:.0f}" if column in speeds else "" for column in columns)
        times = " / ".join(f"{_time(result, name, batch) / _time(result, names[0], batch):.2f}" for batch in _DECODE)
        lines.append([NAMES[name], *shown, times])
    return f"{result['device']}, tokens per second; commit {result['commit']}.\n\n{table(heads, lines)}"


def _time(result: Result, name: str, batch: int) -> float:
    """Time of a decode step for each byte of weights that it reads."""
    rows = (row for row in result["rows"] if (row["model"], row["mode"], row["batch"]) == (name, "decode", batch))
    time: float = next(rows)["step_ms"] / bytes_read(name, batch)
    return time


def bytes_read(name: str, tokens: int) -> float:
    """Bytes of weights that a step of tokens reads, each of whose experts is as likely as any other."""
    config = json.loads((RESULTS.parent / "models" / name / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    experts = config.get("num_experts") or config["n_routed_experts"]
    chosen = config.get("num_experts_per_tok") or config["top_k_experts"]
    dense = config.get("first_k_dense_replace", 0)
    read = experts * (1 - (1 - chosen / experts) ** tokens) + config.get("n_shared_experts", 0)
    packed = 3 * hidden * config["moe_intermediate_size"] * read * (layers - dense)
    # Gemma 4's layers have a dense part and experts.
    packed += 3 * hidden * config["intermediate_size"] * (layers if config.get("enable_moe_block") else dense)
    plain = config["vocab_size"] * hidden + experts * hidden * (layers - dense)
    for layer in range(layers):
        own_packed, own_plain = _attention(config, layer)
        packed, plain = packed + own_packed, plain + own_plain
    total: float = packed * _NF4 + plain * 2
    return total


def _attention(config: dict[str, Any], layer: int) -> tuple[int, int]:
    """Weights of a layer's attention in NF4, and in 16 bits: the heads' matrices of latents."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "kv_lora_rank" in config:
        rank, plain, width = config["kv_lora_rank"], config["qk_nope_head_dim"], config["v_head_dim"]
        rotary, query = config["qk_rope_head_dim"], config["q_lora_rank"]
        queries = heads * (plain + rotary)
        made = hidden * queries if query is None else query * (hidden + queries)
        return made + hidden * (rank + rotary) + heads * width * hidden, heads * (plain + width) * rank
    if "global_head_dim" in config and layer % _GLOBAL_EVERY == _GLOBAL_EVERY - 1:
        # Their keys are their values, too.
        return hidden * config["global_head_dim"] * (2 * heads + config["num_global_key_value_heads"]), 0
    return hidden * config["head_dim"] * 2 * (heads + config["num_key_value_heads"]), 0
