"""The queries of a dashboard's JSON, with its variables filled in as Grafana fills them in when it is opened."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

METRIC = re.compile(r"\b(?:nf4|process|up)(?:_[a-z0-9_]+)?\b")


@dataclass(frozen=True)
class PanelQuery:
    """One query of one panel."""

    panel: str
    legend: str
    expression: str


def panels_of(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The panels that show something, in order; rows are looked into."""
    for panel in board["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels") or ()
        else:
            yield panel


def queries_of(board: dict[str, Any], rate_interval: str) -> list[PanelQuery]:
    """All queries; rate_interval stands for $__rate_interval."""
    values = variables_of(board) | {"__rate_interval": rate_interval}
    return [
        PanelQuery(panel["title"], target["legendFormat"], fill(target["expr"], values))
        for panel in panels_of(board)
        for target in panel["targets"]
    ]


def variables_of(board: dict[str, Any]) -> dict[str, str]:
    """The value that each variable has at first."""
    found = {}
    for variable in board["templating"]["list"]:
        if variable["type"] != "datasource":
            value = variable["current"]["value"]
            found[variable["name"]] = variable["allValue"] if value == "$__all" else value
    return found


def fill(expression: str, values: dict[str, str]) -> str:
    """Put values in for $names. Raises KeyError for a name that is not among them."""
    return re.sub(r"\$(\w+)", lambda match: values[match[1]], expression)


def metrics_of(expression: str) -> set[str]:
    """The names of the metrics that an expression asks for."""
    return set(METRIC.findall(re.sub(r"\{[^}]*\}", "", expression)))
