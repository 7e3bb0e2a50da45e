"""Processors of all model types with images: what they make of an image fits the model's tower and transformers' own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from server.checkpoint.images import IMAGE_TYPES, without_images
from server.checkpoint.loading import load_model
from server.config import EngineConfig
from server.engine.runtime.model.image_tower import ImageTower
from server.engine.runtime.model.projections import replace_projections
from server.images.decoding import ImageError
from server.images.processor import ImageProcessor
from tests.api.images.image_models import KINDS, picture, write_image_model
from tests.checkpoint.layouts import CPU, silent
from tests.engine.model.image_prompts import Picture, Prompt

SIZES = [(40, 30), (28, 28), (100, 20), (15, 90), (200, 170)]
NEED_PACKAGES = {
    "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "glm4v",
    "glm46v", "glm4v_moe", "gemma4", "internvl",
}  # fmt: skip
"""Those whose processor classes transformers does not load without torchvision or num2words."""


@pytest.fixture(scope="module", params=KINDS)
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, write_image_model(folder / "model", request.param)


def test_all_types_are_tried() -> None:
    assert set(KINDS) == IMAGE_TYPES


def test_an_images_tensors_and_tokens_fit_the_tower(named: tuple[str, Path]) -> None:
    name, folder = named
    assert without_images(folder, EngineConfig()) is None
    processor = ImageProcessor(folder)
    assert processor.placeholder in KINDS[name].shown
    model = load_model(folder, CPU, torch.float32, silent, towers=True)
    # As when serving; where a CPU has AVX512-BF16, bitsandbytes' own layers take no rows shorter than a block.
    replace_projections(model)
    tower = ImageTower(model)
    counts = set()
    for seed, (width, height) in enumerate(SIZES):
        if name == "mistral3" and width * height <= 28 * 28:  # transformers' own projector fails at a single patch
            with pytest.raises(ImageError, match="smaller than two patches"):
                processor.prepare(picture(seed, width, height))
            continue
        tensors, text, count = processor.prepare(picture(seed, width, height))
        ids = processor._tokenizer.encode(text, add_special_tokens=False)
        assert ids.count(tower.token_id) == count > 0
        shown = Picture({key: torch.from_numpy(array) for key, array in tensors.items()}, ids, tower.token_id)
        with torch.inference_mode():
            (placed,) = tower.layout([5, *ids, 6], Prompt([[5], shown, [6]]).images).images
            assert len(tower.features(placed).embeddings) == count
        counts.add(count)
    assert (len(counts) > 1) == (name not in ("llava", "gemma3")), "of one size, or of as many as the image asks for"


def test_it_is_what_transformers_own_processor_makes(named: tuple[str, Path]) -> None:
    name, folder = named
    if name in NEED_PACKAGES:
        with pytest.raises((ImportError, ValueError)):
            AutoProcessor.from_pretrained(folder, backend="pil")
        return
    own = AutoProcessor.from_pretrained(folder, backend="pil")
    processor = ImageProcessor(folder)
    for seed, (width, height) in enumerate(SIZES):
        image = picture(seed, width, height)
        tensors, text, _ = processor.prepare(image)
        expected = own(images=[image], text=processor.placeholder, return_tensors="np", add_special_tokens=False)
        assert processor._tokenizer.encode(text, add_special_tokens=False) == expected["input_ids"][0].tolist()
        for key, array in tensors.items():
            assert np.array_equal(array, expected[key])


def test_rows_of_pixtral_end_with_a_token(tmp_path: Path) -> None:
    processor = ImageProcessor(write_image_model(tmp_path / "model", "mistral3"))
    tensors, text, count = processor.prepare(Image.new("RGB", (84, 56)))
    assert text == "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"
    assert count == 6
    assert tensors["pixel_values"].shape == (1, 3, 56, 84)
    # Larger ones are scaled to the longest edge of its settings.
    _, text, _ = processor.prepare(Image.new("RGB", (560, 280)))
    assert text.count("[IMG]") == 4 * 2
