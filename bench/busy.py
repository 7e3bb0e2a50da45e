"""Decode of hundreds of sequences and of long contexts on a GPU: python -m bench.busy --help.

The engine is called directly, with random NF4 weights; requests are greedy and get 120 tokens each. Decode is timed from the
step in which every request has 16 tokens to the last one, prefill until every request has its first token. Each form of the
KV cache is an engine of its own, one after the other in one process. Writes bench/results/busy-<device>.json; the rows that
the file had become its "before", so that two states of the code stand beside each other.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import get_args

import torch

import nf4_kernels
from bench.e2e import engine_speed
from bench.e2e.results import Row
from bench.machine import current_commit, gpu_in_file_names, versions
from server.config import EngineConfig, KVCacheDtype
from server.engine.core import Engine
from server.engine.start import load_runner
from server.engine.supervisor.child import ENVIRONMENT

MODELS = Path(__file__).parent / "models"
RESULTS = Path(__file__).parent / "results"
ANSWER = 120
DECODE = "1x100,100x100,150x100,200x100,256x100,300x100,512x100,700x100,16x4000,16x12000,5x20000"
PREFILL = "4x3000,8x2048"
WARM_UP = 1000
"""Prompts up to this many tokens are decoded twice, and the second time counts; longer ones once."""


def points_of(text: str) -> list[tuple[int, int]]:
    """Pairs of two numbers each: "1x100,8x100"."""
    pairs = [point.split("x") for point in text.split(",") if point]
    return [(int(batch), int(length)) for batch, length in pairs]


def rows_of(model: str, dtype: KVCacheDtype, options: argparse.Namespace) -> list[Row]:
    """Every row of one engine whose KV cache has a dtype ("auto": 16 bit)."""
    config = EngineConfig(
        device="cuda",
        load_format="dummy",
        max_num_seqs=max(batch for batch, _ in options.decode),
        max_num_batched_tokens=options.budget,
        max_model_len=max(length for _, length in [*options.decode, *options.prefill]) + 2 * ANSWER,
        kv_cache_bytes=options.kv_gib * 2**30,
        kv_cache_dtype=dtype,
        dtype=options.dtype,
    )
    started = time.perf_counter()
    runner = load_runner(MODELS / model, config, lambda part, share: None)
    engine = Engine(runner, config)
    rows: list[Row] = [{"model": model, "mode": "start", "kv": dtype, "ready_s": time.perf_counter() - started}]
    print(json.dumps(rows[-1]), flush=True)
    vocabulary = runner.limits.vocab_size
    for batch, length in options.prefill:
        engine_speed.prefill(engine, batch, length, vocabulary, seed=2)
        speed = engine_speed.prefill(engine, batch, length, vocabulary, seed=3)
        rows.append(
            {"model": model, "mode": "prefill", "kv": dtype, "batch": batch, "length": length, "ours_tok_s": speed}
        )
        print(json.dumps(rows[-1]), flush=True)
    for batch, length in options.decode:
        for seed in range(2 if length <= WARM_UP else 1):
            result = engine_speed.decode(engine, batch, vocabulary, seed, length, ANSWER)
        rows.append(
            {
                "model": model,
                "mode": "decode",
                "kv": dtype,
                "batch": batch,
                "length": length,
                "ours_tok_s": result["tok_s"],
                "step_ms": result["step_ms"],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    """Measure every point and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.busy", description=__doc__)
    parser.add_argument(
        "model", nargs="?", default="llama-3.1-8b", choices=sorted(path.name for path in MODELS.iterdir())
    )
    parser.add_argument(
        "--decode", type=points_of, default=points_of(DECODE), help="sequences x tokens of the prompt, ..."
    )
    parser.add_argument("--prefill", type=points_of, default=points_of(PREFILL), help="prompts x tokens, ...")
    parser.add_argument(
        "--kv", nargs="+", default=["auto"], choices=get_args(KVCacheDtype), help="forms of the KV cache"
    )
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16"], help="of activations")
    parser.add_argument("--kv-gib", type=int, default=40)
    parser.add_argument("--budget", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--out", type=Path, help="the file that rows go to")
    options = parser.parse_args()
    if ENVIRONMENT.keys() - os.environ:
        # The server starts its engine with these variables; C libraries and torch read them when they are loaded.
        os.execve(sys.executable, [sys.executable, "-m", "bench.busy", *sys.argv[1:]], {**ENVIRONMENT, **os.environ})
    device = gpu_in_file_names()
    path = options.out or RESULTS / f"busy-{device}.json"
    rows: list[Row] = []
    for dtype in options.kv:
        rows += rows_of(options.model, dtype, options)
        gc.collect()
        torch.cuda.empty_cache()
    commit = current_commit()
    rows = [{**row, "commit": commit} for row in rows]
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    what = f"random weights, {ANSWER} tokens out; ours_tok_s from the 16th token to the last, step_ms the median step"
    state = {"device": device, "kernels": nf4_kernels.capabilities()["cuda"], "commit": commit, "versions": versions()}
    path.write_text(json.dumps({**state, "what": what, "rows": rows, "before": before}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
