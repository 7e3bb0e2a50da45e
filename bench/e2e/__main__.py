"""Decode and prefill speed of the engine on dummy NF4 weights: python -m bench.e2e --help.

The engine is called directly, in one process; --peers adds transformers' generate and generate_batch with bitsandbytes'
kernels in the same run (prefill of one prompt there, of one and of eight here). Decode is timed from the step in which
every request has 16 tokens to the last one, prefill until every request has its first token. Writes
bench/results/e2e-<device>.json after every model, also when it is stopped, and keeps the rows that were not measured again.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from bench.e2e.engine_speed import FIRST
from bench.e2e.measure import MODELS, measure
from bench.e2e.results import Row, write
from bench.machine import current_commit, gpu_in_file_names
from server.engine.supervisor.child import ENVIRONMENT

RESULTS = Path(__file__).parents[1] / "results"


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
    parser.add_argument("--clients", type=int, help="of the real server's closed loop; default with --http: up to 32")
    parser.add_argument("--fidelity", action="store_true", help="compare log-probabilities with transformers', too")
    parser.add_argument("--batch-invariant", action="store_true", help="decode only, in rows of their own")
    parser.add_argument("--eager", action="store_true", help="transformers' own layers, no CUDA graphs")
    parser.add_argument(
        "--tensor-parallel", type=int, default=0, help="GPUs; rows of 1 and more go to bench/results/tp-<device>.json"
    )
    parser.add_argument("--out", type=Path, help="the file that rows go to")
    options = parser.parse_args()
    if options.peers and options.peer_tokens <= FIRST:
        parser.error(f"--peer-tokens must be more than {FIRST}: transformers is timed from its {FIRST}th token on")
    if options.clients is not None and options.clients < 1:
        parser.error(f"--clients must be at least 1, got {options.clients}")
    if options.http and options.clients is None:
        options.clients = min(32, max(options.batches))
    if options.tensor_parallel and (options.peers or options.clients or options.fidelity or len(options.models) > 1):
        parser.error("--tensor-parallel measures the engine alone, one model at a time")
    if ENVIRONMENT.keys() - os.environ:
        # The server starts its engine with these variables; C libraries and torch read them when they are loaded.
        command = [sys.executable, "-m", "bench.e2e", *sys.argv[1:]]
        os.execve(sys.executable, command, {**ENVIRONMENT, **os.environ})
    device = gpu_in_file_names()
    path = options.out or RESULTS / f"{'tp' if options.tensor_parallel else 'e2e'}-{device}.json"
    commit = current_commit()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for name in options.models:
        rows: list[Row] = []
        try:
            measure(name, options, rows)
        finally:
            write(path, device, rows, commit)
    if options.tensor_parallel > 1:
        sys.stdout.flush()
        os._exit(0)  # the end of NCCL would wait for ranks that have ended
    return 0


if __name__ == "__main__":
    sys.exit(main())
