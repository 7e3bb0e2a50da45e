"""Graphs of steps that check guesses, as far as they can be made without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from server.engine.runtime.graphs import decode
from tests.engine.models import tiny_model


def test_layers_are_compiled_apart_from_those_of_decode_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same number of tokens: those may leave the rotary embedding to the attention, these may not."""
    found: list[bool] = []

    class Noted(CustomGraphPass):
        def __init__(self, applies_rotary: bool) -> None:
            self._applies_rotary = applies_rotary

        def __call__(self, graph: torch.fx.Graph) -> None:
            found.append(self._applies_rotary)

        def uuid(self) -> None:
            return None

    @contextmanager
    def noting(applies_rotary: bool) -> Iterator[None]:
        with config.patch(post_grad_custom_pre_pass=Noted(applies_rotary)):
            yield

    monkeypatch.setattr(decode, "fused_operations", noting)
    model = tiny_model("qwen3", num_hidden_layers=2)
    ids = torch.arange(3, 11)[None]
    with torch.inference_mode(), config.patch(force_disable_caches=True):
        expected = model(input_ids=ids, use_cache=False).logits
        for applies_rotary, shared in ((True, False), (False, True), (True, False), (False, True)):
            with decode._compiled_layers(model, applies_rotary, shared):
                torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected)
    assert found == [True, False]
