"""Dashboards and alert rules: up to date, and asking only for metrics that there are."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.__main__ import FOLDER, documents
from dashboards.overview import TOKEN_LIMITS, TTFT_LIMITS
from dashboards.queries import fill, metrics_of, panels_of, queries_of
from server.observability.metrics import FIRST_TOKEN_BUCKETS, TOKEN_BUCKETS, Metrics

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "docker/prometheus"
ALERTS = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())["groups"][0]["rules"]
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


@pytest.fixture(scope="module")
def boards() -> list[dict[str, Any]]:
    return [json.loads(text) for text in documents().values()]


def defined() -> set[str]:
    """Names of the series that the server can have, and the one that Prometheus adds."""
    names = {"up"}
    for family in Metrics("m").registry.collect():
        names |= {family.name + suffix for suffix in SUFFIXES[family.type]}
    return names


def test_the_json_is_what_the_code_makes() -> None:
    made = documents()
    assert {path.name for path in FOLDER.glob("*.json")} == set(made)
    for name, text in made.items():
        assert (FOLDER / name).read_text() == text, f"{name} is out of date: make dashboards"


def test_panels_ask_only_for_metrics_that_are_defined(boards: list[dict[str, Any]]) -> None:
    for board in boards:
        queries = queries_of(board, "1m")
        assert len(queries) > 15
        for query in queries:
            asked = metrics_of(query.expression)
            assert asked, query
            assert asked <= defined(), (query.panel, asked - defined())
            assert "$" not in query.expression


def test_a_metric_that_is_not_defined_is_noticed() -> None:
    asked = metrics_of('sum by (le) (rate(nf4_gone_seconds_bucket{model_name="nf4_x", up="1"}[1m])) / nf4_engine_up')
    assert asked - defined() == {"nf4_gone_seconds_bucket"}
    with pytest.raises(KeyError):
        fill("$nobody", {})


def test_panels_fill_rows_of_24_columns(boards: list[dict[str, Any]]) -> None:
    for board in boards:
        places = [panel["gridPos"] for panel in panels_of(board)]
        rows: dict[int, int] = {}
        for place in places:
            rows[place["y"]] = rows.get(place["y"], 0) + place["w"]
        assert set(rows.values()) == {24}, rows


def test_objectives_are_bounds_of_buckets() -> None:
    assert {float(limit) for limit in TTFT_LIMITS} <= set(FIRST_TOKEN_BUCKETS)
    assert {float(limit) for limit in TOKEN_LIMITS} <= set(TOKEN_BUCKETS)
    # As the text format writes them.
    assert all(str(float(limit)) == limit for limit in (*TTFT_LIMITS, *TOKEN_LIMITS))


def test_alerts_ask_only_for_metrics_that_are_defined() -> None:
    for rule in ALERTS:
        asked = metrics_of(rule["expr"])
        assert asked, rule["alert"]
        assert asked <= defined(), (rule["alert"], asked - defined())


def test_every_alert_has_a_test_that_it_fires_and_one_that_it_does_not() -> None:
    cases = yaml.safe_load((Path(__file__).parent / "alerts_test.yaml").read_text())["tests"]
    found = {(c["alert_rule_test"][0]["alertname"], "exp_alerts" in c["alert_rule_test"][0]) for c in cases}
    assert found == {(rule["alert"], fires) for rule in ALERTS for fires in (True, False)}


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt install prometheus)"
)
@pytest.mark.parametrize(
    "command",
    [
        ["check", "rules", "docker/prometheus/alerts.yaml"],
        ["check", "config", "docker/prometheus/prometheus.yaml"],
        ["test", "rules", "tests/observability/alerts_test.yaml"],
    ],
)
def test_promtool(command: list[str]) -> None:
    done = subprocess.run(["promtool", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
