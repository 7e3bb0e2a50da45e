"""Answers of an engine on some GPUs: `python -m tests.parallel.cuda_answers FOLDER RANKS STEPS FILE TURN`."""

from __future__ import annotations

import fcntl
import json
import os
import random
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from server.config import EngineConfig
from server.engine.parallel.processes import start_processes

# Decode alone, mixed steps in graphs, and prompts that are too long for those.
PROMPTS = (5, 40, 200, 700, 1500, 17)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    # A random model's logits are nearly alike. At a usual temperature thousands of tokens are as likely as their neighbours,
    # so that roundings of sums sample another one.
    "sampled": {"temperature": 0.02, "seed": 7},
    "filtered": {"temperature": 0.02, "seed": 9, "top_p": 0.9, "top_k": 8},
    "penalized": {"temperature": 0.0, "repetition_penalty": 1.2},
    "scored": {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 0},
}
TOKENS = 16


def prompts(kind: str, vocabulary: int) -> list[list[int]]:
    """The prompts of a kind, the same in all processes."""
    rng = random.Random(kind)
    return [[rng.randrange(3, vocabulary) for _ in range(length)] for length in PROMPTS]


def _failed(reason: str, _fatal: bool) -> None:
    print(f"the ranks failed: {reason}", file=sys.stderr, flush=True)
    os._exit(3)


def answers(folder: Path, steps: str, processes: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """By kind and prompt: tokens, and log-probabilities of the prompt and the answer; and the prompts' embeddings.

    steps: eager, graphs, lookup, or draft, with the draft model in folder/draft. processes: the other ranks', which end.
    """
    from server.engine.core import Engine
    from server.engine.parallel.start import load_ranks
    from tests.engine.factories import fix_costs, make_request, run_together
    from tests.engine.model.test_hidden_states import embedding_of, state
    from tests.engine.speculation.engines import CHEAP

    config = EngineConfig(
        device="cuda", tensor_parallel_size=len(processes) + 1, enforce_eager=steps == "eager", max_num_seqs=8,
        max_model_len=2048, kv_cache_bytes=2**30, expanded_weights="off",
        speculation=steps if steps in ("lookup", "draft") else "off",
        draft_model=f"{folder}/draft" if steps == "draft" else None,
    )  # fmt: skip
    runner, workers = load_ranks(folder, config, lambda *_: None, _failed, [], processes)
    engine = Engine(runner, config)
    if config.speculation != "off":  # a small model's steps are so short that draft tokens would seldom pay
        fix_costs(engine, CHEAP)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    found = {}
    for kind, options in KINDS.items():
        requests = [
            make_request(prompt, f"{kind} {len(prompt)}", max_tokens=TOKENS, ignore_eos=True, **options)
            for prompt in prompts(kind, vocabulary)
        ]
        for name, outputs in run_together(engine, *requests).items():
            entries = [entry for o in outputs for entry in (*(o.prompt_logprobs or []), *(o.logprobs or []))]
            found[name] = {
                "tokens": [token for o in outputs for token in o.new_token_ids],
                "logprobs": [entry.logprob for entry in entries],
                "errors": [o.error for o in outputs if o.error],
            }
    accepted = sum(engine.stats().accepted_by_place)
    asked = [embedding_of(prompt, str(len(prompt))) for prompt in prompts("embedded", vocabulary)]
    embeddings = {name: state(outputs[-1]).tolist() for name, outputs in run_together(engine, *asked).items()}
    if workers is not None:
        workers.end()
    return {"answers": found, "accepted_drafts": accepted, "embeddings": embeddings}


def main() -> None:
    """Import, as the other ranks and other such processes do, then wait for a turn on the GPUs: the lock of the file TURN.

    STEPS: as of answers(), which FILE gets as JSON, or images, whose answers are checked here; FOLDER's name is the model
    type then.
    """
    folder, ranks, steps, file = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    processes = start_processes(ranks, True, [])
    # Here, so that the other ranks import meanwhile.
    import torch

    from tests.engine.model.test_images_cuda import check_images

    status = 1
    try:
        with Path(sys.argv[5]).open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if steps == "images":
                check_images(folder.name, 64, folder, torch.device("cuda", 0), torch.bfloat16, processes)
            else:
                file.write_text(json.dumps(answers(folder, steps, processes)))
        status = 0
    except Exception:
        traceback.print_exc()
    # NCCL's end would wait for ranks that have gone; those that are left end with this process.
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
