"""Decode and prefill speed of the engine on dummy NF4 weights: python -m bench.e2e --help.

The engine is called directly, in one process; --peers adds transformers' generate and generate_batch with bitsandbytes'
kernels in the same run (prefill of one prompt there, of one and of eight here). Decode is timed from the step in which
every request has FIRST tokens to the last one, prefill until every request has its first token. Writes
bench/results/e2e-<device>.json, also of what was done when it is stopped, and keeps rows of what was not run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
import transformers

from bench import fidelity, peers, served
from server.checkpoint.dummy import dummy_model
from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.start import load_runner
from server.engine.supervisor.process import ENVIRONMENT
from server.types import GenerateRequest, SamplingParams

MODELS = Path(__file__).parent / "models"
RESULTS = Path(__file__).parent / "results"
PROMPT = ANSWER = 128
FIRST = 16
HTTP_SECONDS = 20
BESIDE = ("hf_generate", "weights_gib", "again_s")  # how columns begin that not every run measures
Row = dict[str, Any]


def requests(count: int, prompt: int, answer: int, vocabulary: int, seed: int) -> list[GenerateRequest]:
    """Greedy requests of random tokens that never end early."""
    draw = random.Random(seed)
    sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    return [
        GenerateRequest(f"{seed}-{i}", [draw.randrange(1000, vocabulary - 1000) for _ in range(prompt)], sampling)
        for i in range(count)
    ]


def decode(engine: Engine, batch: int, vocabulary: int, seed: int) -> dict[str, float]:
    """Tokens per second of batch requests together, and the median step in milliseconds."""
    for request in requests(batch, PROMPT, ANSWER, vocabulary, seed):
        engine.add(request)
    generated, started, begun_with, steps = 0, 0.0, 0, []
    least: dict[str, int] = {}
    while engine.has_work:
        before = time.perf_counter()
        for output in engine.step().outputs:
            generated += len(output.new_token_ids)
            least[output.request_id] = least.get(output.request_id, 0) + len(output.new_token_ids)
        now = time.perf_counter()
        if started:
            steps.append(now - before)
        elif len(least) == batch and min(least.values()) >= FIRST:
            started, begun_with = now, generated
    elapsed = time.perf_counter() - started
    return {"tok_s": (generated - begun_with) / elapsed, "step_ms": statistics.median(steps) * 1e3}


def prefill(engine: Engine, batch: int, length: int, vocabulary: int, seed: int) -> float:
    """Prompt tokens per second of batch prompts of length tokens."""
    for request in requests(batch, length, 1, vocabulary, seed):
        engine.add(request)
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    return batch * length / (time.perf_counter() - started)


def closed_loop(engine: Engine, clients: int, count: int, vocabulary: int, seed: int) -> float:
    """Generated tokens per second of count requests, so many at a time: what clients of a server do, without one."""
    waiting = requests(count, PROMPT, ANSWER, vocabulary, seed)
    started = time.perf_counter()
    for _ in range(clients):
        engine.add(waiting.pop())
    while engine.has_work:
        for output in engine.step().outputs:
            if output.finish_reason is not None and waiting:
                engine.add(waiting.pop())
    return count * ANSWER / (time.perf_counter() - started)


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
    )
    runner = load_runner(folder, config, _print_progress)
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
    for batch in options.batches:
        decode(engine, batch, vocabulary, seed=0)
        best = decode(engine, batch, vocabulary, seed=1)
        rows.append({"model": name, "mode": mode, "batch": batch, "ours_tok_s": best["tok_s"], **best})
        print(json.dumps(rows[-1]), flush=True)
    for length in options.prefill:
        prefill(engine, 1, length, vocabulary, seed=2)
        for batch in (1, 8):
            speed = prefill(engine, batch, length, vocabulary, seed=2 + batch)
            place = {"batch": batch, "length": length}
            rows.append({"model": name, "mode": mode.replace("decode", "prefill"), **place, "ours_tok_s": speed})
            print(json.dumps(rows[-1]), flush=True)
    rows.append(
        {"model": name, "mode": mode.replace("decode", "start"), "ready_s": ready, **memory, "peak_gib": _gib(_peak())}
    )
    print(json.dumps(rows[-1]), flush=True)
    direct = 0.0
    if options.http:
        clients = _clients(options)
        closed_loop(engine, clients, 2 * clients, vocabulary, seed=6)
        direct = closed_loop(engine, clients, 4 * clients, vocabulary, seed=7)
    scored = fidelity.score(engine, vocabulary, seed=5) if options.fidelity else []
    del engine, runner
    _free()
    if options.peers or scored:
        _add_peers(name, rows, scored, options)
    if options.http:
        _add_served(name, rows, direct, options)


def _clients(options: argparse.Namespace) -> int:
    return int(min(32, max(options.batches)))


def _add_served(name: str, rows: list[Row], direct: float, options: argparse.Namespace) -> None:
    """Add rows of the real server: so many clients at once beside the engine alone (direct), then the rates asked for."""
    settings = {
        "device": "cuda",
        "max_num_seqs": max(options.batches),
        "max_num_batched_tokens": options.budget,
        "max_model_len": options.max_model_len,
        "kv_cache_bytes": options.kv_gib * 2**30,
        "enforce_eager": options.eager,
    }
    clients = _clients(options)
    started = time.perf_counter()
    with served.serving(MODELS / name / "config.json", settings) as url:
        for row in rows:
            if row["mode"] == "start":
                # With what the engine before has compiled.
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
    """Put what transformers reaches into the rows of the batches asked for; a peer that fails leaves its reason."""
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
    # Last: it changes the model's attention for good.
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


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def main() -> int:
    """Measure the models asked for and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.e2e", description=__doc__)
    parser.add_argument("models", nargs="*", default=sorted(folder.name for folder in MODELS.iterdir()))
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32, 128])
    parser.add_argument("--prefill", type=_numbers, default=[2048, 8192])
    parser.add_argument("--budget", type=int, default=4096, help="max_num_batched_tokens")
    parser.add_argument("--max-model-len", type=int, default=8448)
    parser.add_argument("--kv-gib", type=int, default=24)
    parser.add_argument("--peers", type=_numbers, default=[], help="batch sizes to run transformers at, too")
    parser.add_argument("--peer-tokens", type=int, default=64)
    parser.add_argument("--http", type=_rates, default=[], help="requests per second to send to the real server, too")
    parser.add_argument("--fidelity", action="store_true", help="compare log-probabilities with transformers', too")
    parser.add_argument("--batch-invariant", action="store_true", help="decode only, in rows of their own")
    parser.add_argument("--eager", action="store_true", help="no compilation, no CUDA graphs")
    parser.add_argument("--out", type=Path, help="default: bench/results/e2e-<device>.json")
    options = parser.parse_args()
    if options.peers and options.peer_tokens <= FIRST:
        parser.error(f"--peer-tokens must be more than {FIRST}: transformers is timed from its {FIRST}th token on")
    if ENVIRONMENT.keys() - os.environ:
        # As the server starts its engine: C libraries and torch ask for it as they are loaded.
        command = [sys.executable, "-m", "bench.e2e", *sys.argv[1:]]
        os.execve(sys.executable, command, {**ENVIRONMENT, **os.environ})
    device = torch.cuda.get_device_name().lower().replace(" ", "-")
    path = options.out or RESULTS / f"e2e-{device}.json"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for name in options.models:
        rows: list[Row] = []
        try:
            measure(name, options, rows)
        finally:
            _write(path, device, rows)
    return 0


def _write(path: Path, device: str, rows: list[Row]) -> None:
    """Write rows and those of the file that were not measured again; what only an earlier run measured stays in a row."""
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    earlier = {_identity(row): row for row in kept}
    rows = [_with_earlier(row, earlier.get(_identity(row), {})) for row in rows]
    measured = {_identity(row) for row in rows}
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "bitsandbytes": bitsandbytes.__version__,
        "python": platform.python_version(),
    }
    rows = sorted([*(row for row in kept if _identity(row) not in measured), *rows], key=_identity)
    path.write_text(json.dumps({"device": device, "versions": versions, "rows": rows}, indent=1) + "\n")


def _with_earlier(row: Row, earlier: Row) -> Row:
    """row with transformers' speeds and the weights' size from earlier where it has none, and our speed beside them."""
    kept = "weights_gib" if "hf_generate_tok_s" in row else BESIDE
    missing = {key: value for key, value in earlier.items() if key.startswith(kept) and key not in row}
    if "hf_generate_tok_s" in missing:
        missing["ours_beside_hf_tok_s"] = earlier.get("ours_beside_hf_tok_s", earlier["ours_tok_s"])
    return {**row, **missing}


def _identity(row: Row) -> tuple[str, str, float, float, float]:
    return row["model"], row["mode"], row.get("batch", 0), row.get("length", 0), row.get("rate", 0)


if __name__ == "__main__":
    sys.exit(main())
