"""All rows of one model: the engine alone, the real server, and transformers with bitsandbytes."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench.e2e import fidelity, peers, served
from bench.e2e.engine_speed import FIRST, PROMPT, closed_loop, decode, prefill
from bench.e2e.results import Row
from server.checkpoint.dummy import dummy_model
from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.parallel.start import load_ranks

MODELS = Path(__file__).parents[1] / "models"
HTTP_SECONDS = 20


def measure(name: str, options: argparse.Namespace, rows: list[Row]) -> None:
    """Add all rows of one model, each as soon as it is measured."""
    folder = MODELS / name
    started = time.perf_counter()
    config = EngineConfig(
        device="cuda",
        load_format="dummy",
        max_num_seqs=max(options.batches),
        max_num_batched_tokens=options.budget,
        max_model_len=options.max_model_len,
        kv_cache_bytes=options.kv_gib * 2**30,
        enforce_eager=options.eager,
        batch_invariant=options.batch_invariant,
        tensor_parallel_size=max(1, options.tensor_parallel),
    )
    runner, workers = load_ranks(folder, config, _print_progress, _end, [])
    ready = time.perf_counter() - started
    gc.collect()
    torch.cuda.empty_cache()
    memory = {
        "kv_gib": options.kv_gib,
        "allocated_gib": _gib(torch.cuda.memory_allocated()),
        "reserved_gib": _gib(torch.cuda.memory_reserved()),
    }
    engine = Engine(runner, config)
    vocabulary = runner.limits.vocab_size
    mode = "decode_batch_invariant" if options.batch_invariant else "decode"
    ours, place = "ours_tok_s", dict[str, float]()
    if options.tensor_parallel:
        ours, place = "tok_s", {"tp": options.tensor_parallel}
        memory["nf4_weights_gib"] = _gib(runner.nf4_weight_bytes)  # rank 0's
    _add_speeds(name, mode, ours, place, engine, vocabulary, options, rows)
    rows.append(
        {
            "model": name,
            "mode": mode.replace("decode", "start"),
            "ready_s": ready,
            **place,
            **memory,
            "peak_gib": _gib(_peak()),
        }
    )
    print(json.dumps(rows[-1]), flush=True)
    direct = 0.0
    if clients := options.clients:
        closed_loop(engine, clients, 2 * clients, vocabulary, seed=6)
        direct = closed_loop(engine, clients, 4 * clients, vocabulary, seed=7)
    scored = fidelity.score(engine, vocabulary, seed=5) if options.fidelity else []
    if workers is not None:
        workers.end()
    del engine, runner
    _free()
    if options.peers or scored:
        _add_peers(name, rows, scored, options)
    if options.clients:
        _add_served(name, rows, direct, options)


def _add_speeds(
    name: str,
    mode: str,
    ours: str,
    place: dict[str, float],
    engine: Engine,
    vocabulary: int,
    options: argparse.Namespace,
    rows: list[Row],
) -> None:
    """Add rows of decode and of prefill; ours is what they call our speed, place what else tells them apart."""
    for batch in options.batches:
        decode(engine, batch, vocabulary, seed=0)
        best = decode(engine, batch, vocabulary, seed=1)
        rows.append({"model": name, "mode": mode, "batch": batch, **place, ours: best["tok_s"], **best})
        print(json.dumps(rows[-1]), flush=True)
    for length in options.prefill:
        prefill(engine, 1, length, vocabulary, seed=2)
        for batch in (1, 8):
            speed = prefill(engine, batch, length, vocabulary, seed=2 + batch)
            shape = {"batch": batch, "length": length}
            rows.append({"model": name, "mode": mode.replace("decode", "prefill"), **shape, **place, ours: speed})
            print(json.dumps(rows[-1]), flush=True)


def _end(reason: str, _fatal: bool) -> None:
    """End this process when other ranks have failed, for which this one may wait for ever."""
    print(f"the run ends: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def _add_served(name: str, rows: list[Row], direct: float, options: argparse.Namespace) -> None:
    """Add rows of the real server: a closed loop beside the engine alone (direct), then the rates asked for."""
    settings = {
        "device": "cuda",
        "max_num_seqs": max(options.batches),
        "max_num_batched_tokens": options.budget,
        "max_model_len": options.max_model_len,
        "kv_cache_bytes": options.kv_gib * 2**30,
        "enforce_eager": options.eager,
    }
    clients = options.clients
    started = time.perf_counter()
    with served.serving(MODELS / name / "config.json", settings) as url:
        for row in rows:
            if row["mode"] == "start":
                # The engine of this process has compiled the layers that this start finds.
                row["again_s"] = time.perf_counter() - started
        served.under_load(url, name, requests=2 * clients, concurrency=clients, seed=1)
        row = served.under_load(url, name, requests=4 * clients, concurrency=clients, seed=2)
        rows.append({"model": name, "mode": "http", "batch": clients, "direct_tok_s": direct, **row})
        print(json.dumps(rows[-1]), flush=True)
        for index, rate in enumerate(options.http):
            row = served.under_load(url, name, requests=max(20, int(rate * HTTP_SECONDS)), rate=rate, seed=3 + index)
            rows.append({"model": name, "mode": "http", "rate": rate, **row})
            print(json.dumps(rows[-1]), flush=True)


def _add_peers(name: str, rows: list[Row], scored: list[fidelity.Scored], options: argparse.Namespace) -> None:
    """Add transformers' speeds to the rows of the batches asked for; of a peer that fails, add the reason."""
    _free()
    model = dummy_model(MODELS / name, torch.device("cuda", 0), torch.bfloat16, _print_progress, seed=0)
    for row in rows:
        if row["mode"] == "start":
            row["weights_gib"] = _gib(torch.cuda.memory_allocated())
    decoding = [row for row in rows if row["mode"] == "decode" and row["batch"] in options.peers]
    lengths = PROMPT, options.peer_tokens, FIRST
    for row in decoding:
        _add_peer(row, "hf_generate", partial(peers.generate, model, row["batch"], *lengths))
    for row in rows:
        if row["mode"] == "prefill" and row["batch"] == 1:
            _add_peer(row, "hf_generate", partial(peers.prefill, model, 1, row["length"]))
    # This comes last, because it changes the model's attention for good.
    for row in decoding:
        _add_peer(row, "hf_generate_batch", partial(peers.generate_batch, model, row["batch"], *lengths))
    del model
    _free()
    if scored:
        model = dummy_model(MODELS / name, torch.device("cuda", 0), torch.bfloat16, _print_progress, seed=0)
        rows.append({"model": name, "mode": "fidelity", **fidelity.compare(model, scored)})
        print(json.dumps(rows[-1]), flush=True)
        del model
        _free()


def _add_peer(row: Row, peer: str, measured: Callable[[], float]) -> None:
    try:
        row[f"{peer}_tok_s"] = measured()
    except Exception as e:
        row[f"{peer}_tok_s"] = None
        row[f"{peer}_error"] = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}"
    print(json.dumps(row), flush=True)


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def _peak() -> int:
    return torch.cuda.max_memory_allocated()


def _gib(count: int) -> float:
    return round(count / 2**30, 3)


def _print_progress(stage: str, fraction: float) -> None:
    print(f"{stage} {fraction:.0%}", file=sys.stderr, flush=True)
