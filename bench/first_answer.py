"""Time from the server's start to its first answer: python -m bench.first_answer --help.

The real server with random weights, asked by HTTP. Its first start finds nothing compiled: what torch and Triton keep, what
the server keeps and FlashInfer's modules are in new folders. The later starts find it. Python's bytecode is written before,
as in an installation that has served another model: where it is missing and is not kept, each start compiles 2900 modules.
Writes bench/results/first-answer-<device>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import torch

from bench.busy import MODELS, RESULTS
from bench.e2e.results import Row
from bench.e2e.served import READY_S, running, write_folder
from bench.machine import cpu_name, current_commit, gpu_in_file_names, versions

CACHES = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "PYTHONPYCACHEPREFIX")
"""Variables that say where compiled code is kept."""


def environment(caches: Path) -> dict[str, str]:
    """Variables of servers that keep what they compile in caches, where bytecode of their imports is."""
    kept = {name: str(caches / name) for name in CACHES} | {"PYTHONDONTWRITEBYTECODE": ""}
    imports = "from server.engine.imports import import_engine; import_engine()"
    for code in (imports, "import server.command_line; server.command_line.keep_torch_out(); import server.serving"):
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **kept}, check=True)
    return kept


def first_answer(folder: Path, settings: dict[str, int | str], kept: dict[str, str]) -> dict[str, float]:
    """Seconds from the process's start until it is ready and until one request is answered. Raises RuntimeError."""
    started = time.perf_counter()
    with running(folder, settings, **kept) as url:
        ready = time.perf_counter() - started
        body = {"model": folder.name, "prompt": list(range(100, 132)), "max_tokens": 4}
        httpx.post(f"{url}/v1/completions", json=body, timeout=READY_S, trust_env=False).raise_for_status()
        return {"ready_s": round(ready, 2), "answer_s": round(time.perf_counter() - started, 2)}


def main() -> int:
    """Measure the starts and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.first_answer", description=__doc__)
    models = sorted(path.name for path in MODELS.iterdir())
    parser.add_argument("model", nargs="?", default="llama-3.1-8b", choices=models)
    parser.add_argument("--sequences", type=int, default=512, help="engine.max_num_seqs")
    parser.add_argument("--gpus", type=int, default=1, help="engine.tensor_parallel_size")
    parser.add_argument("--cached", type=int, default=2, help="starts behind the first one")
    parser.add_argument("--out", type=Path, help="the file that rows go to")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    path = options.out or RESULTS / f"first-answer-{gpu_in_file_names() if on_gpu else 'cpu'}.json"
    settings = {"max_num_seqs": options.sequences, "tensor_parallel_size": options.gpus}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as work:
        folder = write_folder(Path(work), MODELS / options.model / "config.json")
        kept = environment(Path(work))
        for number in range(1 + options.cached):
            found = first_answer(folder, settings, kept)
            rows.append({"model": options.model, **settings, "cached": bool(number), **found})
            print(json.dumps(rows[-1]), flush=True)
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    state = {"device": name, "cpu": cpu_name(), "commit": current_commit(), "versions": versions()}
    path.write_text(json.dumps({**state, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
