"""One of several ranks that do the same, without an engine between them: `python -m tests.parallel.rank`.

Every rank schedules the same requests and samples for itself; what rank 0 got is printed.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch

from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.exchange import Membership
from server.engine.start import load_runner
from tests.engine.factories import make_request, run_together, tokens

CONFIG = EngineConfig(
    device="cpu", threads=1, block_size=4, kv_cache_bytes=2**20, max_num_batched_tokens=16, max_num_seqs=4,
    enforce_eager=True,
)  # fmt: skip
PROMPTS = (3, 41, 17, 9)


def answers(folder: Path, membership: Membership | None, config: EngineConfig = CONFIG) -> dict[str, list[int]]:
    """The tokens of some requests, greedy ones and sampled ones, by the prompt's length."""
    runner = load_runner(folder, config, lambda *_: None, membership)
    engine = Engine(runner, config)
    rng, vocabulary = random.Random(0), runner.limits.vocab_size
    prompts = [[rng.randrange(3, vocabulary) for _ in range(length)] for length in PROMPTS]
    requests = [
        make_request(prompt, str(len(prompt)), temperature=temperature, seed=5, ignore_eos=True)
        for prompt, temperature in zip(prompts, (0.0, 0.0, 0.0, 0.8), strict=True)
    ]
    return {name: tokens(outputs) for name, outputs in run_together(engine, *requests).items()}


def main() -> None:
    """Arguments: rank, count, store, folders."""
    rank, count, store, *folders = sys.argv[1:]
    torch.set_num_threads(1)
    found = {}
    for index, folder in enumerate(folders):
        found[folder] = answers(Path(folder), Membership(int(rank), int(count), f"{store}-{index}"))
    if rank == "0":
        print(json.dumps(found))


if __name__ == "__main__":
    main()
