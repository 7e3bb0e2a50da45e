"""Ask every query of every panel of a Prometheus: python -m dashboards.check [URL] [--png FILE].

The Prometheus must scrape a server that has had some load, refused requests among it; without URL both are started
here, with the embedded model (the program `prometheus` must be installed). Fails, naming it, where a query has no
data or an alert's rule cannot be evaluated. --png draws the overview from Prometheus' answers (needs the extra "plots").
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx

from dashboards.__main__ import FOLDER
from dashboards.loaded import loaded
from dashboards.queries import PanelQuery, panels_of, queries_of


class Prometheus:
    """Prometheus' HTTP API. Raises RuntimeError with its message when it does not take a query."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=30, trust_env=False)

    def instant(self, expression: str) -> list[float]:
        """The numbers that an expression has now, one a series; what is not a number is left out."""
        series = self._ask("/api/v1/query", {"query": expression})
        values = [float(one["value"][1]) for one in series]
        return [value for value in values if not math.isnan(value)]

    def range(self, expression: str, minutes: float, step_s: float) -> list[tuple[dict[str, str], list[Any]]]:
        """Labels and [time, value] pairs of each series over the last minutes."""
        now = time.time()
        query = {"query": expression, "start": now - 60 * minutes, "end": now, "step": step_s}
        return [(one["metric"], one["values"]) for one in self._ask("/api/v1/query_range", query)]

    def broken_rules(self) -> list[str]:
        """Names and errors of the alert rules that it cannot evaluate."""
        groups = self._http.get("/api/v1/rules").json()["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        if not rules:
            return ["there are no rules"]
        return [f"{rule['name']}: {rule.get('lastError', '')}" for rule in rules if rule["health"] == "err"]

    def _ask(self, path: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
        document = self._http.get(path, params=parameters).json()
        if document["status"] != "success":
            raise RuntimeError(f"{document.get('error')}: {parameters['query']}")
        found: list[dict[str, Any]] = document["data"]["result"]
        return found


def without_data(prometheus: Prometheus, board: dict[str, Any], interval: str) -> list[PanelQuery]:
    """The queries of a dashboard that have no number now."""
    return [query for query in queries_of(board, interval) if not prometheus.instant(query.expression)]


def check(prometheus: Prometheus, interval: str) -> list[str]:
    """What is wrong with dashboards and rules, a line each; says how many queries have data."""
    wrong = [f"alert {line}" for line in prometheus.broken_rules()]
    for path in sorted(FOLDER.glob("*.json")):
        board = json.loads(path.read_text())
        missing = without_data(prometheus, board, interval)
        wrong += [f"{path.name}: no data: {q.panel!r} ({q.legend}): {q.expression}" for q in missing]
        asked = len(queries_of(board, interval))
        print(f"{path.name}: {len(list(panels_of(board)))} panels, {asked - len(missing)} of {asked} queries have data")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Check all dashboards; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dashboards.check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("prometheus", metavar="URL", nargs="?", help="left out: a server and a Prometheus are started")
    parser.add_argument("--rate-interval", default="5m", help="Grafana's $__rate_interval (default 5m)")
    parser.add_argument("--png", type=Path, help="draw the overview there")
    parser.add_argument("--minutes", type=float, default=5, help="drawn: the last so many (default 5)")
    parser.add_argument("--load-seconds", type=float, default=30, help="of the server started here (default 30)")
    options = parser.parse_args(arguments)
    with nullcontext(options.prometheus) if options.prometheus else loaded(options.load_seconds) as url:
        prometheus = Prometheus(url)
        wrong = check(prometheus, options.rate_interval)
        if options.png:
            from dashboards.picture import draw

            draw(prometheus, json.loads((FOLDER / "overview.json").read_text()), options.png, options.minutes)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
