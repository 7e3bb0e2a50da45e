"""First tokens right after a start: the first 48 requests of 8 streams beside later ones, embedded model, over HTTP.

    python -m bench.after_start                      # three starts of this checkout
    python -m bench.after_start OTHER/CHECKOUT .     # each starts in turn, and so three times

Every start is a new server, and its requests begin as soon as /health says 200. Prompts have 128 tokens, and answers are of
one length. The first 48 begin with eight prompts at once, which wait for each other, and only later are the streams spread
out. So what a start costs is not how they differ from the next 48, but from a third 48: other prompts in the same pattern,
sent to the same server once it is idle again. The exit status is 1 where an answer failed.
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
PARTS = (f"first {HALF}", f"next {HALF}", f"first {HALF} again")


def first_tokens(folder: Path, tokens: int) -> dict[str, list[float]]:
    """Seconds to the first token of the parts of the load to a new server of a checkout's code, by PARTS.

    tokens: how many each answer has. Raises RuntimeError when an answer failed.
    """
    with contextlib.chdir(folder), serving() as server:
        # Another seed gives other prompts.
        loads = [
            Load(server.url, MODEL, requests=requests, concurrency=STREAMS, answer_tokens=(tokens, tokens), seed=seed)
            for seed, requests in enumerate((2 * HALF, HALF))
        ]
        answers = [answer for load in loads for answer in asyncio.run(run_load(load))]
    if bad := [answer for answer in answers if not answer.ok]:
        raise RuntimeError(f"{folder}: {len(bad)} answers failed, one of them: {bad[0].error or bad[0].status}")
    seconds = [answer.chunks[0] - answer.sent for answer in answers]
    return {part: seconds[i * HALF : (i + 1) * HALF] for i, part in enumerate(PARTS)}


def main() -> int:
    """Print a line for each start, and then medians and maxima over all starts of each checkout as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path()])
    parser.add_argument("--starts", type=int, default=3, help="of each checkout")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    options = parser.parse_args()
    parts: dict[Path, dict[str, list[float]]] = {folder: {part: [] for part in PARTS} for folder in options.checkouts}
    for start in range(options.starts):
        for folder in options.checkouts:
            found = first_tokens(folder.resolve(), options.tokens)
            for part, seconds in found.items():
                parts[folder][part].extend(seconds)
            said = ", ".join(f"{statistics.median(v):.3f} s (at most {max(v):.3f})" for v in found.values())
            print(f"{folder}, start {start + 1}: {said}; load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    for folder, found in parts.items():
        rows = {part: quantiles(seconds) for part, seconds in found.items()}
        print(json.dumps({"checkout": str(folder), "starts": options.starts, "seconds": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
