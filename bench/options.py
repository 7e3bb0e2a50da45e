"""Cost of sampling options in decode on a GPU: tokens per second as a share of greedy's, interleaved.

python -m bench.options --model llama-3.1-8b --batch 32

Each form runs as it does in the server ("device") and with each step executed after the one before has been read ("host"),
in one engine with random weights. Before anything is timed, both have to give the same tokens. A tokenizer of the model's
size is made of the embedded model's tokenizer and of invented words. Writes bench/results/options-<device>.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.grammar import FORMS as GRAMMARS
from bench.machine import current_commit, versions
from server.checkpoint.source import resolve_checkpoint
from server.config import EMBEDDED_MODEL, EngineConfig, default_cache_dir
from server.engine.core import Engine
from server.engine.grammar import Grammars
from server.engine.runtime.runner import ModelRunner
from server.engine.start import load_runner
from server.text.grammars.grammar import regex_grammar
from server.types import GenerateRequest, SamplingParams, TokenLogprob

MODELS = Path(__file__).parent / "models"
RESULTS = Path(__file__).parent / "results"
PROMPT, ANSWER, CHECKED = 128, 160, 24
FIRST = 16
"""Decode is timed from the step in which every request has this many tokens."""
MODES = ("host", "device")
SCHEMA = GRAMMARS["schema"]
REGEX = regex_grammar("([a-z]{1,9} ){600}")
Options = Callable[[int], dict[str, Any]]
_numbers = itertools.count()


def _all(**options: Any) -> Options:
    return lambda index: options


def _one(**options: Any) -> Options:
    return lambda index: options if index == 0 else {}


FORMS: dict[str, Options] = {
    "greedy": _all(),
    "repetition and presence penalty": _all(repetition_penalty=1.1, presence_penalty=0.5),
    "repetition penalty, one": _one(repetition_penalty=1.1),
    "logprobs 5": _all(logprobs=5),
    "logprobs 5, one": _one(logprobs=5),
    "logit_bias": _all(logit_bias={1000: 2.0, 2000: -100.0, 3000: 1.5}),
    "min_tokens": _all(min_tokens=ANSWER, stop_token_ids=tuple(range(5, 45))),
    "schema": _all(grammar=SCHEMA),
    "schema, one": _one(grammar=SCHEMA),
    "schema, sampled": _all(grammar=SCHEMA, temperature=0.8),
    "regex": _all(grammar=REGEX),
    "temperature": _all(temperature=0.8),
    "top_p": _all(temperature=0.8, top_p=0.9),
    "top_p and top_k": _all(temperature=0.8, top_p=0.9, top_k=50),
    "penalty, logprobs, bias, top_p": _all(
        repetition_penalty=1.1, logprobs=3, temperature=0.8, top_p=0.9, logit_bias={1000: 2.0}
    ),
}


class Bench:
    """An engine that runs the forms."""

    def __init__(self, model: str, batch: int) -> None:
        self.batch = batch
        config = EngineConfig(
            device="cuda",
            load_format="dummy",
            max_num_seqs=batch,
            max_num_batched_tokens=max(8192, batch * PROMPT),
            max_model_len=2048,
            kv_cache_bytes=8 * 2**30,
            enable_prefix_caching=False,
            expanded_weights="off",
        )
        self.runner: ModelRunner = load_runner(MODELS / model, config, lambda *_: None)
        self._execute_async = self.runner.execute_async
        self._vocabulary = self.runner.limits.vocab_size
        folder = made_up_tokenizer(self._vocabulary)
        self._engine = Engine(self.runner, config, Grammars(folder, self._vocabulary, 2))

    def answers(self, form: str, mode: str) -> list[tuple[list[int], list[TokenLogprob]]]:
        """Tokens and log-probabilities of each request."""
        requests = self._requests(form, CHECKED, seed=0)
        tokens: defaultdict[str, list[int]] = defaultdict(list)
        logprobs: defaultdict[str, list[TokenLogprob]] = defaultdict(list)
        engine = self._start(mode, requests)
        while engine.has_work:
            for output in engine.step().outputs:
                if output.error is not None:
                    raise RuntimeError(f"{form} ({mode}): {output.error}")
                tokens[output.request_id] += output.new_token_ids
                logprobs[output.request_id] += output.logprobs or []
        return [(tokens[request.request_id], logprobs[request.request_id]) for request in requests]

    def speed(self, form: str, mode: str, seed: int) -> float:
        """Tokens per second of all requests together."""
        engine = self._start(mode, self._requests(form, ANSWER, seed))
        had: defaultdict[str, int] = defaultdict(int)
        generated, begun_with, started = 0, 0, 0.0
        while engine.has_work:
            for output in engine.step().outputs:
                generated += len(output.new_token_ids)
                had[output.request_id] += len(output.new_token_ids)
            if not started and len(had) == self.batch and min(had.values()) >= FIRST:
                started, begun_with = time.perf_counter(), generated
        return (generated - begun_with) / (time.perf_counter() - started)

    def _start(self, mode: str, requests: list[GenerateRequest]) -> Engine:
        ahead = self._execute_async if mode == "device" else lambda *_: None
        self.runner.execute_async = ahead  # type: ignore[method-assign]
        engine = self._engine
        for request in requests:
            engine.add(request)
        return engine

    def _requests(self, form: str, tokens: int, seed: int) -> list[GenerateRequest]:
        rng = random.Random(seed)
        made = []
        for index in range(self.batch):
            prompt = [rng.randrange(1000, self._vocabulary - 1000) for _ in range(PROMPT)]
            options = {"temperature": 0.0, "seed": 1000 * seed + index, **FORMS[form](index)}
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, **options)
            made.append(GenerateRequest(str(next(_numbers)), prompt, params))
        return made


def made_up_tokenizer(vocabulary: int) -> Path:
    """A folder with the embedded model's tokenizer, and words of random letters up to a vocabulary's size."""
    folder = resolve_checkpoint(EMBEDDED_MODEL, default_cache_dir(), lambda *_: None)
    definition = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    words: dict[str, int] = definition["model"]["vocab"]
    rng, letters = random.Random(0), "abcdefghijklmnopqrstuvwxyz"
    number = max(*words.values(), *(token["id"] for token in definition["added_tokens"])) + 1
    while number < vocabulary:
        word = rng.choice(("", "Ġ")) + "".join(rng.choice(letters) for _ in range(rng.randrange(4, 11)))
        if word not in words:
            words[word] = number
            number += 1
    made = Path(tempfile.mkdtemp())
    (made / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    return made


def _report_difference(bench: Bench, form: str) -> None:
    """Print whether both modes give the same tokens, and how far log-probabilities differ."""
    host, device = (bench.answers(form, mode) for mode in MODES)
    same = sum(one[0] == other[0] for one, other in zip(host, device, strict=True))
    pairs = [
        (one, other)
        for (tokens, logprobs), (others, other_logprobs) in zip(host, device, strict=True)
        if tokens == others
        for one, other in zip(logprobs, other_logprobs, strict=True)
    ]
    worst = max((abs(one.logprob - other.logprob) for one, other in pairs), default=0.0)
    tops = sum([t for t, _ in one.top] != [t for t, _ in other.top] for one, other in pairs)
    said = f", log-probabilities off by {worst:.1e}, {tops} of {len(pairs)} with other alternatives" if pairs else ""
    print(f"{form}: {same} of {bench.batch} answers equal{said}", flush=True)


def main() -> int:
    """Print each form's shares, and write them; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=sorted(path.name for path in MODELS.iterdir()))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--out", type=Path, help="default: bench/results/options-<device>.json")
    asked = parser.parse_args()
    bench = Bench(asked.model, asked.batch)
    for form in asked.forms:
        _report_difference(bench, form)
    rates: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for seed in range(1 + asked.rounds):
        for form, mode in itertools.product(asked.forms, MODES):
            greedy, own = bench.speed("greedy", mode, seed), bench.speed(form, mode, seed)
            if seed:  # the first round warms up
                rates[form, mode].append((own, own / greedy))
    rows: list[dict[str, Any]] = []
    for form, mode in rates:
        rate, share = (statistics.median(column) for column in zip(*rates[form, mode], strict=True))
        rows.append({"model": asked.model, "batch": asked.batch, "form": form, "mode": mode, "tok_s": round(rate)})
        rows[-1] |= {"of_greedy": round(share, 3), "commit": current_commit()}
        print(f"{form:>32} {mode:>7} {rate:8.0f} tokens/s, {share:.3f} of greedy", flush=True)
    device = torch.cuda.get_device_name()
    target = asked.out or RESULTS / f"options-{device.replace(' ', '-').lower()}.json"
    report = {"device": device, "versions": versions(), "rows": rows}
    target.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
