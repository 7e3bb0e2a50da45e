"""The tables of README.md and of pages of docs/ are what bench/results/ says."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.readme import MARKED, PAGES, TABLES, rendered


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert rendered(text) == text


def test_every_table_is_on_a_page() -> None:
    assert {match["name"] for page in PAGES for match in MARKED.finditer(page.read_text())} == TABLES.keys()


def test_the_readme_is_one_screen_and_two_tables() -> None:
    text = PAGES[0].read_text()
    assert len(text.splitlines()) <= 180
    assert [match["name"] for match in MARKED.finditer(text)] == ["headline", "vllm-plugin"]
