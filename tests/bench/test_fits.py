"""The table of models that fit a GPU is what the server's own arithmetic says."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from bench.fits import MODELS, cached_tokens, footprint
from bench.tables.fits import GIB
from bench.tables.results import load
from server.checkpoint.parts import described_by
from server.config import EngineConfig

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
    config = AutoConfig.from_pretrained(MODELS / "qwen3-8b", local_files_only=True)
    info = described_by(MODELS / "qwen3-8b", config)
    plain, small = EngineConfig(), EngineConfig(kv_cache_dtype="int8")
    found = [cached_tokens(info, config, size * GIB, plain) for size in (4, 12, 24)]
    assert found[0] == 0 < found[1] < found[2]
    assert cached_tokens(info, config, 24 * GIB, small) > 1.6 * found[2]
