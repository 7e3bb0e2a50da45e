"""Markdown of bench/results/options-*.json: what sampling options cost in decode."""

from __future__ import annotations

from bench.tables.markdown import table
from bench.tables.results import load

OPTIONS = "options-nvidia-h200.json"
_MODES = {"device": "within async scheduling", "host": "one step after another"}


def options() -> str:
    """Each form of options by its share of greedy's speed, with them within async scheduling and without."""
    result = load(OPTIONS)
    shares: dict[tuple[str, str], dict[str, str]] = {}
    for row in result["rows"]:
        shares.setdefault((row["form"], row["commit"]), {})[row["mode"]] = f"{row['of_greedy']:.2f}"
    first = result["rows"][0]
    about = f"{result['device']}, {first['batch']} sequences of {first['model']}."
    lines = [[form, *(found.get(mode, "") for mode in _MODES), commit] for (form, commit), found in shares.items()]
    return f"{about}\n\n{table(['of greedy speed', *_MODES.values(), 'commit'], lines)}"
