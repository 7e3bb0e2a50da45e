"""Speculation by lookup on real texts: tokens per second with it and without, interleaved in one run.

python -m bench.speculation.texts --batches 1,8

Tasks whose answers repeat their prompts (edit this file, answer from this document, JSON in and JSON out) and tasks whose
answers do not, greedy, over texts of this repository. Every text of a task counts: with one sequence they run one after
another, with more side by side. Decode is timed from the step in which every request has its first token to that in which
the first one ends, while all sequences run; how much later or earlier the last one ends is in a figure of its own. A round
runs each engine once; figures are those of the median round, and ratios are the medians of the rounds' ratios. Writes
bench/results/speculation-<device>.json.
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
        """Messages of the user, one for each text."""
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
    """One run of a task."""

    tokens: int
    """Tokens that were decoded while all sequences ran."""
    seconds: float
    """Seconds that all sequences ran."""
    last: float
    """Seconds until the last sequence ended."""
    answers: list[list[int]]

    @property
    def rate(self) -> float:
        """Tokens per second while all sequences ran."""
        return self.tokens / self.seconds


def run(engine: Engine, prompts: list[list[int]], tokens: int, clock: Callable[[], float]) -> Run:
    """Generate from all prompts at once."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    for prompt in prompts:
        request = GenerateRequest(str(next(_numbers)), prompt, params)
        answers[request.request_id] = []
        engine.add(request)
    begun = first_end = None
    before = counted = 0
    while engine.has_work:
        ended = False
        for output in engine.step().outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            answers[output.request_id] += output.new_token_ids
            ended |= output.finish_reason is not None
        if begun is None and all(answers.values()):
            begun, before = clock(), sum(map(len, answers.values()))
        if ended and first_end is None:
            first_end, counted = clock(), sum(map(len, answers.values()))
    assert begun is not None
    assert first_end is not None
    return Run(counted - before, first_end - begun, clock() - begun, list(answers.values()))


def run_task(engine: Engine, batches: list[list[list[int]]], tokens: int, clock: Callable[[], float]) -> Run:
    """Run batches of prompts one after another, as one run."""
    runs = [run(engine, prompts, tokens, clock) for prompts in batches]
    return Run(
        sum(own.tokens for own in runs),
        sum(own.seconds for own in runs),
        sum(own.last for own in runs),
        [answer for own in runs for answer in own.answers],
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
    batches = [[prompt] for prompt in prompts] if batch == 1 else [[prompts[i % len(prompts)] for i in range(batch)]]
    plain: list[Run] = []
    drafted: list[Run] = []
    for engine in (on, off):
        run_task(engine, batches, tokens, clock)
    before = on.stats()
    for number in range(rounds):
        # The engine that runs first changes from round to round.
        for engine in (on, off) if number % 2 else (off, on):
            (drafted if engine is on else plain).append(run_task(engine, batches, tokens, clock))
    for one, other in zip(plain[-1].answers, drafted[-1].answers, strict=True):
        if one != other:
            place = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
            print(f"  {task.name}: answers differ from token {place} on")
    after = on.stats()
    drafts, checked = after.drafts - before.drafts, after.draft_tokens - before.draft_tokens
    accepted = sum(after.accepted_by_place) - sum(before.accepted_by_place)
    return Row(
        EMBEDDED_MODEL,
        "lookup",
        task.name + (", copies" if task.copies else ""),
        batch,
        round(checked / drafts, 2) if drafts else 0.0,
        round(accepted / checked, 3) if checked else 0.0,
        round(statistics.median(own.rate for own in drafted), 1),
        round(statistics.median(own.rate for own in plain), 1),
        round(statistics.median(a.rate / b.rate for a, b in zip(drafted, plain, strict=True)), 3),
        round(statistics.median(b.last / a.last for a, b in zip(drafted, plain, strict=True)), 3),
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
            f" {row.last_ratio:.2f} x until the last; {row.draft_tokens:.1f} draft tokens, {row.accept_rate:.2f} right",
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
