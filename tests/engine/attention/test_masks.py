"""Windows and chunks read from transformers' mask functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from server.engine.runtime.attention import probe
from server.engine.runtime.attention.base import UnsupportedModelError
from server.engine.runtime.attention.masks import Reach, UnknownMaskError, read_mask
from server.engine.runtime.attention.probe import probe_layers
from tests.moe_checkpoints import tiny_moe


@pytest.mark.parametrize("positions", [1, 2, 11, 12, 13, 24, 25, 100, 4097])
def test_windows_and_chunks_are_found_where_contexts_exceed_them(positions: int) -> None:
    assert read_mask(causal_mask_function, positions) == Reach()
    windows, chunks = (
        sliding_window_causal_mask_function(12),
        chunked_causal_mask_function(12, torch.zeros(1, dtype=int)),
    )
    if positions <= 12:
        assert read_mask(windows, positions) == read_mask(chunks, positions) == Reach()
    else:
        assert read_mask(windows, positions) == Reach(window=12)
        # One token beyond a chunk is told from a window by what it sees of that chunk.
        assert read_mask(chunks, positions) == Reach(chunk=12)


def test_a_window_of_one_token() -> None:
    assert read_mask(sliding_window_causal_mask_function(1), 50) == Reach(window=1)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (bidirectional_mask_function, "neither causal"),
        (and_masks(causal_mask_function, lambda b, h, q, k: q != k), "neither causal"),
        (or_masks(sliding_window_causal_mask_function(9), lambda b, h, q, k: k < 2), "neither causal"),
        (and_masks(causal_mask_function, lambda b, h, q, k: torch.zeros(1)[k] == 0), "cannot be read"),
    ],
)
def test_other_masks_are_refused(function: Any, message: str) -> None:
    with pytest.raises(UnknownMaskError, match=message):
        read_mask(function, 64)


@pytest.mark.parametrize(
    ("family", "settings", "windows"),
    [
        ("phimoe", {"sliding_window": 12}, [12, 12]),
        ("phimoe", {"sliding_window": None}, [None, None]),
        ("phimoe", {"sliding_window": 256}, [None, None]),
        ("qwen2_moe", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, [7, None]),
        ("mixtral", {"sliding_window": 12}, [12, 12]),
        ("gpt_oss", {}, [12, None]),
    ],
)
def test_layers_have_the_windows_of_their_masks(family: str, settings: dict[str, Any], windows: list[int]) -> None:
    _, options, _ = probe_layers(tiny_moe(family, **settings))
    assert [option.window for option in options] == windows


def test_chunks_that_contexts_exceed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_moe("llama4_text", layer_types=["chunked_attention", "full_attention"], attention_chunk_size=16)
    assert [option.window for option in probe_layers(model)[1]] == [None, None]  # contexts are of one chunk
    monkeypatch.setattr(probe, "own_limit", lambda config: 256)
    with pytest.raises(UnsupportedModelError, match="attends within chunks of 16 tokens, and contexts may have 256"):
        probe_layers(model)
