"""Speculation by lookup on real texts: tokens per second with it and without, interleaved in one run.

python -m bench.speculation.texts --batches 1,8

Tasks whose answers repeat their prompts (edit this file, answer from this document, JSON in and JSON out) and tasks whose
answers do not, greedy, over texts of this repository. Decode is timed from the step in which every request has its first
token to the last one. A round runs each engine once; figures are those of the median round, and the ratio is the median of
the rounds' ratios. Writes bench/results/speculation-<device>.json.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from bench.speculation.results import Row, default_path, write
from server.checkpoint.source import resolve_checkpoint
from server.config import EMBEDDED_MODEL, EngineConfig, default_cache_dir
from server.engine.core import Engine
from server.engine.runtime.runner import ModelRunner
from server.engine.start import load_runner
from server.types import GenerateRequest, SamplingParams

ROOT = Path(__file__).parents[2]
_numbers = itertools.count()


@dataclass(frozen=True)
class Task:
    """An instruction, and the parts of files that it is about: each a path, its first line and the number of lines."""

    name: str
    copies: bool
    instruction: str
    texts: tuple[tuple[str, int, int], ...] = ()
    others: tuple[str, ...] = ()
    """Instructions of a task without texts."""

    def prompts(self) -> list[str]:
        """What the user says, for each text."""
        found = list(self.others)
        for path, first, count in self.texts:
            lines = (ROOT / path).read_text(encoding="utf-8").splitlines()[first : first + count]
            found.append(f"{self.instruction}\n\n" + "\n".join(lines))
        return found


TASKS = (
    Task(
        "edit",
        True,
        "Rename the class in this Python file to Renamed and give the whole file again, otherwise unchanged:",
        (
            ("server/engine/scheduling/block_tables.py", 0, 44),
            ("server/engine/clock.py", 12, 38),
            ("server/engine/scheduling/blocks.py", 10, 50),
            ("server/engine/runtime/attention/rotary.py", 0, 42),
        ),
    ),
    Task(
        "document",
        True,
        "What does this document say? Quote every sentence of it that matters, in its own words:",
        (
            ("docs/architecture.md", 120, 16),
            ("docs/api.md", 28, 18),
            ("docs/metrics.md", 60, 18),
            ("CONTRIBUTING.md", 8, 20),
        ),
    ),
    Task(
        "json",
        True,
        "Sort this JSON's objects by their first number and answer with the whole JSON, nothing else:",
        (
            ("bench/results/busy-nvidia-h200.json", 0, 40),
            ("bench/results/e2e-nvidia-h200.json", 0, 40),
            ("docker/grafana/dashboards/overview.json", 0, 60),
            ("server/api/static/vendor/pins.json", 0, 30),
        ),
    ),
    Task(
        "story",
        False,
        "",
        others=(
            "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
            "Write a short story about a robot that learns to paint.",
            "Write a poem about the sea in winter.",
            "Describe a market in a town by a river.",
        ),
    ),
    Task(
        "explain",
        False,
        "",
        others=(
            "Explain how a bicycle stays upright.",
            "Why is the sky blue, and why are sunsets red?",
            "What are the advantages and disadvantages of nuclear power?",
            "Explain what a hash table is to a beginner.",
        ),
    ),
)


@dataclass
class Run:
    """One run of a batch."""

    rate: float
    """Tokens per second of decode."""
    answers: list[list[int]]
    drafts: int
    draft_tokens: int
    accepted: int


def run(engine: Engine, prompts: list[list[int]], tokens: int, clock: Callable[[], float]) -> Run:
    """Generate from all prompts at once."""
    before = engine.stats()
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    for prompt in prompts:
        request = GenerateRequest(str(next(_numbers)), prompt, params)
        answers[request.request_id] = []
        engine.add(request)
    started, begun, counted = 0.0, False, 0
    while engine.has_work:
        for output in engine.step().outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            answers[output.request_id] += output.new_token_ids
        if not begun and all(answers.values()):
            begun, started, counted = True, clock(), sum(map(len, answers.values()))
    seconds = clock() - started
    after = engine.stats()
    return Run(
        (sum(map(len, answers.values())) - counted) / seconds,
        list(answers.values()),
        after.drafts - before.drafts,
        after.draft_tokens - before.draft_tokens,
        sum(after.accepted_by_place) - sum(before.accepted_by_place),
    )


def measure(
    task: Task,
    batch: int,
    prompts: list[list[int]],
    engines: tuple[Engine, Engine],
    tokens: int,
    rounds: int,
    clock: Callable[[], float],
) -> Row:
    """A row from that many rounds, after one that does not count. Says where answers differ."""
    off, on = engines
    chosen = [prompts[i % len(prompts)] for i in range(batch)]
    plain: list[Run] = []
    guessed: list[Run] = []
    for number in range(rounds + 1):
        # The engine that runs first changes from round to round.
        for engine in (off, on) if number % 2 else (on, off):
            (guessed if engine is on else plain).append(run(engine, chosen, tokens, clock))
    for one, other in zip(plain[-1].answers, guessed[-1].answers, strict=True):
        if one != other:
            place = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
            print(f"  {task.name}: answers differ from token {place} on")
    plain, guessed = plain[1:], guessed[1:]
    drafts, checked, accepted = (
        sum(getattr(own, name) for own in guessed) for name in ("drafts", "draft_tokens", "accepted")
    )
    return Row(
        EMBEDDED_MODEL,
        "lookup",
        task.name + (", copies" if task.copies else ""),
        batch,
        round(checked / drafts, 2) if drafts else 0.0,
        round(accepted / checked, 3) if checked else 0.0,
        round(statistics.median(own.rate for own in guessed), 1),
        round(statistics.median(own.rate for own in plain), 1),
        round(statistics.median(a.rate / b.rate for a, b in zip(guessed, plain, strict=True)), 3),
    )


def _engines(runner: ModelRunner, config: EngineConfig) -> tuple[Engine, Engine]:
    """Without speculation and with it, on one model; they never run at the same time."""
    return Engine(runner, config.model_copy(update={"speculation": "off"})), Engine(runner, config)


def _batches(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.speculation.texts", description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--batches", type=_batches, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="default: bench/results/speculation-<device>.json")
    parser.add_argument(
        "--processor-time", action="store_true", help="instead of the wall's, on a machine that does other things, too"
    )
    asked = parser.parse_args()
    clock = time.process_time if asked.processor_time else time.perf_counter
    folder = resolve_checkpoint(EMBEDDED_MODEL, default_cache_dir(), lambda *_: None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = EngineConfig(
        device=asked.device, threads=asked.threads, speculation="lookup", enable_prefix_caching=False, max_num_seqs=32
    )
    runner = load_runner(folder, config, lambda *_: None)
    engines = _engines(runner, config)
    on_gpu = runner.device.type == "cuda"
    rows = []
    for task, batch in itertools.product(TASKS, asked.batches):
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in task.prompts()
        ]
        rows.append(measure(task, batch, prompts, engines, asked.tokens, asked.rounds, clock))
        row = rows[-1]
        print(
            f"{row.task:16} batch {row.batch:3}: {row.tok_s:8.1f} tokens/s, {row.off_tok_s:8.1f} without, {row.ratio:.2f} x;"
            f" {row.guesses:.1f} guesses, {row.accept_rate:.2f} right",
            flush=True,
        )
    path = asked.out or default_path(on_gpu)
    write(
        path, rows, on_gpu, tokens=asked.tokens, rounds=asked.rounds, threads=asked.threads,
        processor_time=asked.processor_time,
    )  # fmt: skip
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
