"""Send every query of every panel to a Prometheus: python -m dashboards.check [URL] [--png FILE].

The Prometheus must scrape a server that has had some load, refused requests among it; without URL both are started
here, with the embedded model (the program `prometheus` must be installed). Fails, naming it, where a query has no
data or an alert's rule cannot be evaluated. --png draws the overview from Prometheus' answers (needs the extra "plots").
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from dashboards.__main__ import FOLDER
from dashboards.loaded import loaded
from dashboards.prometheus import Prometheus
from dashboards.queries import PanelQuery, panels_of, queries_of


def without_data(prometheus: Prometheus, board: dict[str, Any], interval: str) -> list[PanelQuery]:
    """The queries of a dashboard that no series answers. A share of nothing is an answer, as of images where none came."""
    return [query for query in queries_of(board, interval) if not prometheus.instant(query.expression)]


def check(prometheus: Prometheus, interval: str) -> list[str]:
    """The faults of dashboards and rules, a line each; prints how many queries have data."""
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
    parser.add_argument(
        "prometheus", metavar="URL", nargs="?", help="if left out, a server and a Prometheus are started"
    )
    parser.add_argument("--rate-interval", default="5m", help="Grafana's $__rate_interval (default 5m)")
    parser.add_argument("--png", type=Path, help="draw the overview there")
    parser.add_argument("--minutes", type=float, default=5, help="the time that is drawn, up to now (default 5)")
    parser.add_argument(
        "--load-seconds", type=float, default=30, help="how long the server started here is under load (default 30)"
    )
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
