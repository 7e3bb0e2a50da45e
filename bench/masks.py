"""The host's time for the grammars of a decode step: taking the last tokens, and finding the next masks. Needs no GPU.

python -m bench.masks

Each sequence follows a grammar by random tokens that it permits. Times are medians over the steps in milliseconds: how long
the engine's thread waits ("wall"), and how long the processor works in all threads ("cpu"), which tells more on a busy
machine. A GPU waits for this work where its forward pass takes less time (docs/adr/0022-options-within-async-scheduling.md).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from bench.grammar import FORMS
from bench.options import made_up_tokenizer
from server.engine.grammar import Grammars
from server.engine.runtime.sampling.grammar_masks import MaskBuffer
from server.engine.scheduling.sequence import Sequence
from server.types import GenerateRequest, SamplingParams

CASES = (1, 8, 32, 128)
"""Sequences."""
END = 2
WARM_UPS = 5
PARTS = ("tokens", "masks")
Seconds = defaultdict[str, list[tuple[float, float]]]


def measure(
    grammars: Grammars, form: str, vocabulary: int, sequences: int, steps: int
) -> dict[str, tuple[float, float]]:
    """The median (wall, cpu) milliseconds of a step of this many sequences, by part."""
    rng, seconds = random.Random(0), Seconds(list)
    grammar = FORMS[form]
    assert grammar is not None
    running = [_sequence(grammars, grammar, seed) for seed in range(sequences)]
    masks = MaskBuffer(vocabulary, torch.device("cpu"))
    for _ in range(WARM_UPS + steps):
        with _timed(seconds["masks"]):
            found, failed = masks.find(running)
        assert not failed
        permitted = np.unpackbits(found.numpy(), axis=1, bitorder="little")
        tokens = [int(rng.choice(np.flatnonzero(row))) for row in permitted]
        with _timed(seconds["tokens"]):
            for sequence, token in zip(running, tokens, strict=True):
                assert sequence.constraint is not None
                sequence.constraint.accept(token)
    return {part: _milliseconds(seconds[part][WARM_UPS:]) for part in PARTS}


def _milliseconds(times: list[tuple[float, float]]) -> tuple[float, float]:
    wall, cpu = (1000 * statistics.median(column) for column in zip(*times, strict=True))
    return wall, cpu


def _sequence(grammars: Grammars, grammar: str, seed: int) -> Sequence:
    made = Sequence(
        GenerateRequest(str(seed), [5], SamplingParams(max_tokens=2, grammar=grammar)), seed, frozenset({END})
    )
    made.bind(grammars.start(grammar))
    return made


@contextmanager
def _timed(times: list[tuple[float, float]]) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    times.append((time.perf_counter() - wall, time.process_time() - cpu))


def main() -> int:
    """Print a table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--tokenizer", type=Path, help="a folder with tokenizer.json; default: one made up")
    asked = parser.parse_args()
    folder = asked.tokenizer or made_up_tokenizer(asked.vocabulary)
    grammars = Grammars(folder, asked.vocabulary, END)
    print(
        f"{'grammar':>9} {'sequences':>9}" + "".join(f" {part + ' wall':>11} {'cpu':>7}" for part in PARTS), flush=True
    )
    for form, sequences in [(form, count) for form in FORMS if FORMS[form] for count in CASES]:
        found = measure(grammars, form, asked.vocabulary, sequences, asked.steps)
        print(
            f"{form:>9} {sequences:>9}" + "".join(f" {found[p][0]:11.3f} {found[p][1]:7.3f}" for p in PARTS), flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
