"""The tables and the picture of speculation say what the benchmark has written."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.speculation import results
from bench.speculation.results import Row, write
from bench.speculation.tables import speculation, speculation_steps, speculation_texts

ROWS = [
    Row("qwen3-32b", "free drafter", "3 draft tokens behind 500 tokens, none right", 1, 3, 0.0, 125.0, 160.0, 0.8),
    Row("qwen3-32b", "free drafter", "7 draft tokens behind 500 tokens, none right", 1, 7, 0.0, 100.0, 160.0, 0.625),
    Row("qwen3-32b", "draft by qwen3-0.6b", "0.7 of draft tokens right", 1, 4.25, 0.691, 281.25, 160.5, 1.751),
    Row("qwen3-32b", "draft by qwen3-0.6b", "0.7 of draft tokens right", 8, 2.0, 0.7, 1300.0, 1000.0, 1.3),
    Row("qwen3-32b", "lookup", "random text", 128, 0.0, 0.0, 5000.0, 5005.0, 0.999),
    Row("smollm2-135m-instruct", "lookup", "edit, copies", 8, 9.0, 0.75, 15000.0, 10000.0, 1.5, 1.1),
]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "current_commit", lambda: "0123abc")
    path = tmp_path / "speculation-cpu.json"
    write(path, ROWS[:3], False, rounds=3)
    write(path, ROWS[2:], False, rounds=3)
    return path


def test_tables(written: Path) -> None:
    about, empty, *lines = speculation(str(written)).splitlines()
    assert "bitsandbytes" in about
    assert not empty
    assert lines[2:] == [
        "| Qwen3-32B | draft by qwen3-0.6b | 0.7 right | 1 | 4.2 | 0.69 | 281.2 | 160.5 | **1.75** | 0123abc |",
        "| Qwen3-32B | draft by qwen3-0.6b | 0.7 right | 8 | 2.0 | 0.70 | 1300.0 | 1000.0 | **1.30** | 0123abc |",
        "| Qwen3-32B | lookup | random text | 128 | 0 |  | 5000.0 | 5005.0 | **1.00** | 0123abc |",
    ]
    heads, _, line = speculation_texts(str(written)).splitlines()[2:]
    assert heads.endswith("| times as fast | until the last | commit |")
    assert line == (
        "| smollm2-135m-instruct | lookup | edit, copies | 8 | 9.0 | 0.75 | 15000.0 | 10000.0 | **1.50** | 1.10 | 0123abc |"
    )
    heads, _, line = speculation_steps(str(written)).splitlines()
    assert heads == "| model | tokens before | no draft token | 3 draft tokens | 7 draft tokens | commit |"
    assert line == "| Qwen3-32B | 500 | 6.25 | 8.00 (1.25) | 10.00 (1.60) | 0123abc |"
