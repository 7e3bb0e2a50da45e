"""One of several ranks that do the same, without an engine between them: `python -m tests.parallel.rank`.

Every rank schedules the same requests and samples for itself, and prints what it got.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

import pytest
import torch

from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.exchange import Membership
from server.engine.runtime.layers.decoder import DecoderLayer
from server.engine.runtime.model.decoder import decoder_layers
from server.engine.runtime.preparation import written_layers
from server.engine.start import load_runner
from tests.engine.factories import make_request, run_together, tokens

CONFIG = EngineConfig(
    device="cpu", threads=1, block_size=4, kv_cache_bytes=2**20, max_num_batched_tokens=16, max_num_seqs=4
)
EAGER = CONFIG.model_copy(update={"enforce_eager": True})
"""The layers are transformers' own."""
PROMPTS = (3, 41, 17, 9)


class Answers(TypedDict):
    """Answers to some requests, greedy ones and sampled ones; by the prompt's length."""

    tokens: dict[str, list[int]]
    logprobs: dict[str, list[float]]
    gaps: dict[str, list[float]]
    """By how much the likeliest token's log-probability is above the next one's."""
    weights: int
    """Bytes of all that the model has."""
    written: bool
    """Whether its layers are written ones."""


def prompts_of(vocabulary: int) -> list[list[int]]:
    """The prompts, of the lengths that PROMPTS has."""
    rng = random.Random(0)
    return [[rng.randrange(3, vocabulary) for _ in range(length)] for length in PROMPTS]


def answers(folder: Path, membership: Membership | None, config: EngineConfig = CONFIG) -> Answers:
    """The answers of a model, or of this rank of it."""
    runner = load_runner(folder, config, lambda *_: None, membership)
    model = runner._paged.model
    engine = Engine(runner, config)
    prompts = prompts_of(runner.limits.vocab_size)
    requests = [
        # Among four tokens, a uniform number is seldom so close to a boundary that rounding decides.
        make_request(prompt, str(len(prompt)), temperature=temperature, top_k=4, seed=5, ignore_eos=True, logprobs=2)
        for prompt, temperature in zip(prompts, (0.0, 0.0, 0.0, 0.8), strict=True)
    ]
    found = run_together(engine, *requests)
    scored = {name: [entry for output in outputs for entry in output.logprobs or ()] for name, outputs in found.items()}
    layers = decoder_layers(model)
    held = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return Answers(
        tokens={name: tokens(outputs) for name, outputs in found.items()},
        logprobs={name: [entry.logprob for entry in entries] for name, entries in scored.items()},
        gaps={name: [entry.top[0][1] - entry.top[1][1] for entry in entries] for name, entries in scored.items()},
        weights=sum(held.values()),
        written=bool(layers) and all(isinstance(layer.forward, DecoderLayer) for layer in layers),
    )


def answers_of_ranks(
    folders: list[Path], count: int, store: Path, refusing: int | None = None
) -> list[dict[str, Answers]]:
    """Answers of each of count ranks, in processes of their own, from the models in folders, by the folder.

    refusing: the rank whose warm-up check finds written layers wrong.
    """
    command = [sys.executable, "-m", "tests.parallel.rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(count), str(store), str(int(rank == refusing)), *map(str, folders)],
            stdout=subprocess.PIPE,
        )
        for rank in range(count)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * count
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def check_same(found: Answers, expected: Answers, what: str) -> None:
    """Equal tokens, and log-probabilities within rounding."""
    assert found["tokens"] == expected["tokens"], what
    for name, scores in expected["logprobs"].items():
        assert found["logprobs"][name] == pytest.approx(scores, abs=2e-3), (what, name)


def main() -> None:
    """Arguments: rank, count, store, whether written layers are to be found wrong, folders."""
    rank, count, store, refuses, *folders = sys.argv[1:]
    torch.set_num_threads(1)
    if refuses == "1":
        written_layers._TOLERANCES = dict.fromkeys(written_layers._TOLERANCES, -1.0)
    found = {}
    for index, folder in enumerate(folders):
        found[folder] = answers(Path(folder), Membership(int(rank), int(count), f"{store}-{index}"))
    print(json.dumps(found), flush=True)
    os._exit(0)  # as the engine's workers end: gloo's threads may end a process that tears itself down


if __name__ == "__main__":
    main()
