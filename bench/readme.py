"""Make the tables of README.md and docs/*.md from bench/results/: python -m bench.readme [--check].

A table stands between <!-- table:NAME --> and <!-- /table -->. --check writes nothing and fails when one is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.api_processes.tables import api_processes
from bench.ray_serve import tables as ray_serve
from bench.speculation import tables as speculation_tables
from bench.tables import busy, cards, engine, fits, hybrids, memory, mixtures, parallel, posed, release, sampling

ROOT = Path(__file__).resolve().parent.parent
NAMES = (
    "README.md",
    "docs/guide.md",
    "docs/clients.md",
    "docs/performance.md",
    "docs/lab/performance.md",
    "docs/scaling.md",
)
PAGES = tuple(ROOT / name for name in NAMES)
MARKED = re.compile(r"(<!-- table:(?P<name>[a-z0-9-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
TABLES: dict[str, Callable[[], str]] = {
    "headline": engine.headline,
    "kernels-short": engine.kernels_short,
    "models": engine.models,
    "kernels": engine.kernels_all,
    "kernels-large": engine.kernels_large,
    "experts": engine.experts,
    "decode": engine.decode,
    "prefill": engine.prefill,
    "vllm": engine.vllm,
    "fits": fits.fits,
    "cards": cards.cards,
    "memory": memory.memory,
    "mixtures": mixtures.mixtures,
    "hybrids": hybrids.hybrids,
    "hybrids-first-tokens": hybrids.first_tokens,
    "posed": posed.posed,
    "release": release.release,
    "vllm-plugin": engine.vllm_plugin,
    "busy": busy.busy,
    "paper": engine.paper,
    "http": engine.http,
    "options": sampling.options,
    "speculation": speculation_tables.speculation,
    "speculation-steps": speculation_tables.speculation_steps,
    "speculation-texts": speculation_tables.speculation_texts,
    "speculation-h200": partial(speculation_tables.speculation, speculation_tables.H200_FILE),
    "speculation-steps-h200": partial(speculation_tables.speculation_steps, speculation_tables.H200_FILE),
    "speculation-cpu": partial(speculation_tables.speculation_texts, speculation_tables.CPU_FILE),
    "fidelity": engine.fidelity,
    "cpu": engine.cpu,
    "several-gpus": parallel.several_gpus,
    "four-gpus": parallel.four_gpus,
    "gpu-starts": parallel.gpu_starts,
    "exchange": parallel.exchange,
    "api-processes": api_processes,
    "ray-affinity": ray_serve.affinity,
    "ray-recovery": ray_serve.recovery,
    "ray-throughput": ray_serve.throughput,
}


def rendered(text: str) -> str:
    """text with every marked table made anew. KeyError for a table that is not known."""
    return MARKED.sub(lambda match: f"{match[1]}{TABLES[match['name']]()}\n{match[3]}", text)


def main() -> int:
    """Rewrite the tables, or with --check say whether they are up to date."""
    outdated = [page for page in PAGES if rendered(page.read_text()) != page.read_text()]
    if "--check" not in sys.argv[1:]:
        for page in outdated:
            page.write_text(rendered(page.read_text()))
        return 0
    for page in outdated:
        name = page.relative_to(ROOT)
        print(f"{name}: its tables are not what bench/results/ says; run `python -m bench.readme`", file=sys.stderr)
    return 1 if outdated else 0


if __name__ == "__main__":
    sys.exit(main())
