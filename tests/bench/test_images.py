"""bench.images measures what it says: new images go through the engine's tower, and through transformers' beside it."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit

from bench import images
from bench.image_preparation import Preparation
from bench.images import Bench, measure, random_model

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


def test_the_tower_beside_it_is_transformers_own(tmp_path: Path) -> None:
    """It stays bitsandbytes' and gives what the engine's gives."""
    model = random_model("tiny", None, CPU, torch.float32, True)
    bench = Bench(model, False)
    assert any(type(module) is Linear4bit for module in bench._tower.modules())
    image = Preparation(tmp_path).prepare(112, 0)
    with torch.inference_mode():
        own = bench._tower(image.tensors["pixel_values"], grid_thw=image.tensors["image_grid_thw"]).pooler_output
        theirs = model.get_image_features(**image.tensors, return_dict=True).pooler_output
    assert own.shape == (16, 256)
    assert torch.allclose(own, torch.cat(list(theirs)), atol=2e-2 * float(own.std()))
