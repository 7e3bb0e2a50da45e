"""The README's tables are what bench/results/ says."""

from __future__ import annotations

from bench.readme import MARKED, README, TABLES, rendered


def test_the_readme_is_up_to_date() -> None:
    text = README.read_text()
    assert rendered(text) == text


def test_every_marked_table_is_known() -> None:
    assert {match["name"] for match in MARKED.finditer(README.read_text())} <= TABLES.keys()
