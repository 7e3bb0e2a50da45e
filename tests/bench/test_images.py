"""bench.images measures what it says: new images go through the engine's tower, and through transformers' beside it."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import pytest
import torch

from bench import images
from bench.images import Bench, measure

CPU = torch.device("cpu")


@pytest.mark.parametrize("nf4_tower", [False, True])
def test_a_tiny_model(nf4_tower: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made: list[Bench] = []
    monkeypatch.setattr(images, "Bench", lambda *given: made.append(Bench(*given)) or made[-1])
    asked = argparse.Namespace(shape="tiny", side=112, text_layers=None, compiled=False, rounds=2)
    row = measure(asked, CPU, nf4_tower)
    assert (row.tokens, row.text_layers, row.tower) == (16, 2, "NF4" if nf4_tower else "float32")
    assert all(value > 0 for name, value in asdict(row).items() if name.endswith("_s") and name != "added_s")
    stats = made[0].engine.stats()
    assert (stats.images_computed, stats.image_feature_hits) == (3, 3)
    assert "an image adds" in capsys.readouterr().out
