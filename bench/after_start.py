"""First tokens right after a start: the first 48 requests of 8 streams beside the next 48, embedded model, over HTTP.

    python -m bench.after_start                      # three starts of this checkout
    python -m bench.after_start OTHER/CHECKOUT .     # each starts in turn, and so three times

Every start is a new server, and its requests begin as soon as /health says 200. Prompts have 128 tokens and answers are of
one length, so streams proceed in lockstep, and both halves do the same work. The exit status is 1 where an answer failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
from pathlib import Path

from bench.embedded_server import MODEL, serving
from bench.load.client import Load, run_load
from bench.load.summary import quantiles

STREAMS = 8
HALF = 48


def first_tokens(folder: Path, tokens: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token of the first and of the next HALF requests to a new server of a checkout's code.

    tokens: how many each answer has. Raises RuntimeError when an answer failed.
    """
    with contextlib.chdir(folder), serving() as server:
        load = Load(server.url, MODEL, requests=2 * HALF, concurrency=STREAMS, answer_tokens=(tokens, tokens))
        answers = asyncio.run(run_load(load))
    if bad := [answer for answer in answers if not answer.ok]:
        raise RuntimeError(f"{folder}: {len(bad)} answers failed, one of them: {bad[0].error or bad[0].status}")
    seconds = [answer.chunks[0] - answer.sent for answer in answers]
    return seconds[:HALF], seconds[HALF:]


def main() -> int:
    """Print a line for each start, and then medians and maxima over all starts of each checkout as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path()])
    parser.add_argument("--starts", type=int, default=3, help="of each checkout")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    options = parser.parse_args()
    halves: dict[Path, tuple[list[float], list[float]]] = {folder: ([], []) for folder in options.checkouts}
    for start in range(options.starts):
        for folder in options.checkouts:
            found = first_tokens(folder.resolve(), options.tokens)
            for seconds, more in zip(halves[folder], found, strict=True):
                seconds.extend(more)
            said = ", ".join(f"{statistics.median(seconds):.3f} s (at most {max(seconds):.3f})" for seconds in found)
            print(f"{folder}, start {start + 1}: {said}; load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    for folder, (first, following) in halves.items():
        rows = {f"first {HALF}": quantiles(first), f"next {HALF}": quantiles(following)}
        print(json.dumps({"checkout": str(folder), "starts": options.starts, "seconds": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
