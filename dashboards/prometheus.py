"""A client of Prometheus' HTTP API."""

from __future__ import annotations

import time
from typing import Any

import httpx


class Prometheus:
    """Prometheus' HTTP API. Raises RuntimeError with its message when it does not take a query."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=30, trust_env=False)

    def instant(self, expression: str) -> list[float]:
        """The present values of an expression, one for each series; a share of nothing is NaN."""
        return [float(one["value"][1]) for one in self._ask("/api/v1/query", {"query": expression})]

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
