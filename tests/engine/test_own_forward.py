"""A model that computes something else over the paged cache than by its class's own forward is refused at the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from server.config import EngineConfig
from server.engine.runtime.attention.base import UnsupportedModelError
from server.engine.runtime.attention.masks import MaskReader, Reach
from server.engine.runtime.attention.paged_cpu import PagedCpuBackend
from server.engine.runtime.preparation.assembly import build_runner
from tests.engine.models import tiny_model

CONFIG = EngineConfig(block_size=4, kv_cache_bytes=2**20, max_num_batched_tokens=16, max_num_seqs=5, enforce_eager=True)


def refused(model: PreTrainedModel, match: str) -> None:
    """Assert that the start of a server refuses model, by the name of its class."""
    with pytest.raises(UnsupportedModelError, match=f"{type(model).__name__} cannot be served.*{match}"):
        build_runner(model, CONFIG)


@pytest.mark.parametrize("name", ["position_ids", "logits_to_keep"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_class_that_ignores_an_argument(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    forward = type(model).forward

    def ignoring(self: Any, position_ids: Any = None, logits_to_keep: Any = 0, **options: Any) -> Any:
        taken = {"position_ids": position_ids, "logits_to_keep": logits_to_keep}
        return forward(self, **options, **{key: value for key, value in taken.items() if key != name})

    monkeypatch.setattr(type(model), "forward", ignoring)
    refused(model, "logits")


def test_a_class_whose_forward_lacks_position_ids_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    forward = type(model).forward

    def without(self: Any, input_ids: Any, logits_to_keep: Any = 0, **others: Any) -> Any:
        return forward(self, input_ids, logits_to_keep=logits_to_keep, use_cache=False)

    monkeypatch.setattr(type(model), "forward", without)
    refused(model, "its forward takes no position_ids")


def test_rows_of_logits_are_selected_for_a_class_that_gives_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    forward = type(model).forward

    def without(self: Any, input_ids: Any, position_ids: Any = None, **others: Any) -> Any:
        return forward(self, input_ids, position_ids=position_ids, use_cache=False)

    monkeypatch.setattr(type(model), "forward", without)
    build_runner(model, CONFIG)


@pytest.mark.parametrize("error", [-1, 1])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_window_that_is_off_by_one(family: str, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read = MaskReader.reach

    def off_by_one(self: MaskReader, mask: torch.Tensor, positions: int) -> Reach:
        reach = read(self, mask, positions)
        return reach if reach.window is None else Reach(window=reach.window + error)

    monkeypatch.setattr(MaskReader, "reach", off_by_one)
    refused(tiny_model(family), "logits of a")


def test_keys_and_values_that_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PagedCpuBackend.attend

    def swapped(self: Any, layer: int, query: Any, key: Any, value: Any, options: Any) -> torch.Tensor:
        return attend(self, layer, query, value, key, options)

    monkeypatch.setattr(PagedCpuBackend, "attend", swapped)
    refused(tiny_model("llama"), "logits of a first chunk")


def test_a_vocabulary_of_fewer_tokens_than_the_check_has() -> None:
    build_runner(tiny_model("gemma3_text", vocab_size=12, pad_token_id=0, bos_token_id=1, eos_token_id=2), CONFIG)


def test_logits_of_its_own_that_overflow_are_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """As eager attention may in float16."""
    model = tiny_model("llama")
    forward = type(model).forward

    def overflowing(self: Any, *given: Any, **options: Any) -> Any:
        output = forward(self, *given, **options)
        if self.config._attn_implementation == "eager":
            output.logits[0, 3] = float("nan")
        return output

    monkeypatch.setattr(type(model), "forward", overflowing)
    build_runner(model, CONFIG)
