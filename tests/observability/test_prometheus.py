"""The dashboards and alerts of a real Prometheus that scrapes a real server under load."""

from __future__ import annotations

import json
import shutil

import pytest

from dashboards.__main__ import FOLDER
from dashboards.check import check, without_data
from dashboards.loaded import loaded
from dashboards.prometheus import Prometheus

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed (Debian: apt install prometheus)"
)


def test_every_panels_query_has_data_and_every_rule_works(embedded_folder: object) -> None:
    with loaded(10) as url:
        prometheus = Prometheus(url)
        assert check(prometheus, "30s") == []
        # What the check would say of a panel whose metric is gone.
        board = json.loads((FOLDER / "overview.json").read_text())
        board["panels"][1]["targets"][0]["expr"] = "rate(nf4_gone_total[1m])"
        assert [query.expression for query in without_data(prometheus, board, "30s")] == ["rate(nf4_gone_total[1m])"]
