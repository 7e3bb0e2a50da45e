"""Cost of a grammar in decode: the engine's tokens per second with and without one, interleaved.

python -m bench.grammar --batch 8
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time

from server.checkpoint.source import resolve_checkpoint
from server.config import EMBEDDED_MODEL, EngineConfig, default_cache_dir
from server.engine.core import Engine
from server.engine.grammar import Grammars
from server.engine.start import load_runner
from server.text.grammars.grammar import json_grammar, regex_grammar
from server.types import GenerateRequest, SamplingParams

# Neither grammar can end before the measurement does: a schema as applications use it, and a regex that allows most words.
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["a", "b", "c"]},
        "n": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "kind", "n", "tags"],
    "additionalProperties": False,
}
FORMS = {
    "none": None,
    "schema": json_grammar({"type": "array", "items": _ITEM, "minItems": 100}),
    "regex": regex_grammar("([a-z]{1,9} ){300}"),
}
_numbers = itertools.count()


def step_seconds(engine: Engine, grammar: str | None, batch: int, tokens: int, temperature: float) -> float:
    """Median time of a decode step of a whole batch."""
    for seed in range(batch):
        params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True, grammar=grammar, seed=seed)
        prompt = [random.randrange(1000, 9000) for _ in range(32)]
        engine.add(GenerateRequest(str(next(_numbers)), prompt, params))
    times = []
    while engine.has_work:
        started = time.perf_counter()
        outputs = engine.step().outputs
        if len(outputs) == batch:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> int:
    """Print tokens per second and the overhead of each form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    asked = parser.parse_args()
    folder = resolve_checkpoint(asked.model, default_cache_dir(), lambda stage, fraction: None)
    config = EngineConfig(device=asked.device, threads=asked.threads, enable_prefix_caching=False)
    runner = load_runner(folder, config, lambda stage, fraction: None)
    limits = runner.limits
    grammars = Grammars(folder, limits.vocab_size, limits.eos_token_ids[0])
    engine = Engine(runner, config, grammars)
    times: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(asked.rounds):
        for name, grammar in FORMS.items():
            times[name].append(step_seconds(engine, grammar, asked.batch, asked.tokens, asked.temperature))
    for name, own in times.items():
        # Compared round by round, because the load of the machine changes from one round to the next.
        overhead = statistics.median(1 - base / seconds for base, seconds in zip(times["none"], own, strict=True))
        rate = asked.batch / statistics.median(own)
        print(f"{name}: {rate:.1f} tokens/s, {100 * overhead:.1f} % less than without a grammar")
    return 0


if __name__ == "__main__":
    sys.exit(main())
