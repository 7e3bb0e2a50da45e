"""The table of models that fit a GPU is what the server's own arithmetic says."""

from __future__ import annotations

import pytest

from bench.fits import footprint
from bench.tables.fits import GIB, cached_tokens
from bench.tables.results import load

ROWS = {row["model"]: row for row in load("fits.json")["rows"]}


@pytest.mark.parametrize("model", ["qwen3-4b", "gpt-oss-20b"])
def test_what_a_model_takes_is_counted_as_a_start_counts_it(model: str) -> None:
    assert footprint(model) == ROWS[model]


@pytest.mark.parametrize(
    ("model", "gib"), [("gemma-3-27b", 15.1), ("llama-3.3-70b", 37.0), ("qwen3-32b", 18.1), ("qwen3-8b", 5.8)]
)
def test_weights_take_what_was_measured(model: str, gib: float) -> None:
    """On an H200 (docs/performance.md)."""
    assert ROWS[model]["weights"] / GIB == pytest.approx(gib, rel=0.03)


def test_less_memory_holds_fewer_tokens_and_eight_bits_hold_more() -> None:
    row = ROWS["qwen3-8b"]
    assert 0 == cached_tokens(row, 4 * GIB) < cached_tokens(row, 12 * GIB) < cached_tokens(row, 24 * GIB)
    assert cached_tokens(row, 24 * GIB, "int8") > 1.9 * cached_tokens(row, 24 * GIB)
