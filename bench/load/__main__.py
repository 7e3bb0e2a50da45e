"""Load a running server over HTTP and measure what its clients see: python -m bench.load --help.

Closed loop (--concurrency): that many clients, each of which sends its next request when its last one has ended.
Open loop (--rate): requests arrive at random (Poisson) or evenly (--arrivals), whether or not earlier ones are answered.
Prompts are lists of random token ids, so that nothing is in the prefix cache and lengths are exact; --chat sends text.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import httpx
from tqdm import tqdm

from bench.load.client import Load
from bench.load.lengths import parse_lengths
from bench.load.processes import run_in_processes
from bench.load.summary import summarize


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.load", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first one that the server lists")
    parser.add_argument("--requests", type=int, default=64)
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--concurrency", type=int, help="closed loop: clients at a time (default 8)")
    loop.add_argument("--rate", type=float, help="open loop: requests per second")
    parser.add_argument("--arrivals", choices=["poisson", "constant"], default="poisson", help="of the open loop")
    lengths = "N, LOW-HIGH or lognormal:MEDIAN:SIGMA"
    parser.add_argument("--prompt-tokens", type=parse_lengths, default=(128, 128), help=lengths)
    parser.add_argument("--answer-tokens", type=parse_lengths, default=(64, 64), help=lengths)
    parser.add_argument("--chat", action="store_true", help="send text to /v1/chat/completions instead of token ids")
    parser.add_argument("--ttft-slo", type=float, help="seconds; counted in goodput")
    parser.add_argument("--itl-slo", type=float, help="seconds per token; counted in goodput")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="to send from; one may be busier than the server")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--png", type=Path, help="draw it there (needs matplotlib: the extra plots)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run one load and print its summary; returns 1 when no request completed."""
    options = _parse(arguments)
    model = options.model or httpx.get(f"{options.base_url}/v1/models").json()["data"][0]["id"]
    load = Load(
        options.base_url, model, options.requests, options.concurrency or (None if options.rate else 8), options.rate,
        options.prompt_tokens, options.answer_tokens, options.chat, options.seed,
        poisson=options.arrivals == "poisson",
    )  # fmt: skip
    with tqdm(total=load.requests, unit="req", file=sys.stderr) as bar:
        answers = run_in_processes(load, options.processes, bar.update)
    summary = summarize(answers, options.ttft_slo, options.itl_slo)
    print(json.dumps(summary, indent=2))
    if options.json:
        options.json.write_text(json.dumps({"load": asdict(load), **summary}, indent=2) + "\n")
    if options.png:
        from bench.load.plot import plot_load

        pattern = f"{load.rate:g} requests/s" if load.rate else f"{load.concurrency} clients"
        plot_load(answers, f"{model}, {pattern}", options.png, (options.ttft_slo, options.itl_slo))
    return 0 if summary["completed"] else 1


if __name__ == "__main__":
    sys.exit(main())
