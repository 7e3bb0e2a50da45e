"""Processors of all model types with images: what they make of an image fits the model's tower and transformers' own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, Idefics3Processor, PreTrainedTokenizerFast

from server.checkpoint.base import CheckpointError
from server.checkpoint.images import IMAGE_TYPES, without_images
from server.checkpoint.loading import load_model
from server.config import EngineConfig
from server.engine.runtime.model.image_tower import ImageTower
from server.engine.runtime.model.projections import replace_projections
from server.images.decoding import ImageError
from server.images.lfm2_vl import Lfm2VlLayout, Lfm2VlSettings
from server.images.pil_processors import PIL_PROCESSORS
from server.images.processor import ImageProcessor
from tests.api.images.image_models import KINDS, picture, write_image_model
from tests.checkpoint.layouts import CPU, change_json, silent
from tests.engine.model.image_prompts import Picture, Prompt
from tests.marks import with_rest

SIZES = [(40, 30), (28, 28), (100, 20), (15, 90), (200, 170), (1, 1), (2000, 2000)]
NEED_PACKAGES = {
    "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "glm4v",
    "glm46v", "glm4v_moe", "gemma4", "internvl", "lfm2_vl", "gemma4_unified", "muse_glimmer",
    "muse_spark",
}  # fmt: skip
"""Those whose processor classes transformers does not load without torchvision or num2words."""
QUICK = ("gemma4", "lfm2_vl", "llava_next", "mistral3", "qwen2_5_vl", "smolvlm")


@pytest.fixture(scope="module", params=with_rest(KINDS, QUICK))
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


def laid_out(name: str, folder: Path, image: Image.Image) -> tuple[dict[str, Any], str]:
    """(tensors of an image, what stands for it in a prompt): transformers' own processors, and the documented layouts."""
    token = KINDS[name].tokens["image_token"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if name not in NEED_PACKAGES:
        own = AutoProcessor.from_pretrained(folder, backend="pil")
        text = own.image_token if name == "llava" else KINDS[name].mark or KINDS[name].tokens.get("boi_token") or token
        both = own(images=[image], text=text, return_tensors="np", add_special_tokens=False)
        return dict(both), tokenizer.decode(both["input_ids"][0])
    images = (
        PIL_PROCESSORS[name](folder)
        if name in PIL_PROCESSORS
        else AutoImageProcessor.from_pretrained(folder, backend="pil")
    )
    if name == "smolvlm":  # its class needs num2words, and lays images out as Idefics 3's
        both = Idefics3Processor(images, tokenizer, image_seq_len=1)(images=[image], text=token, return_tensors="np")
        return dict(both), tokenizer.decode(both["input_ids"][0])
    if name == "mistral3":
        tensors = images(images=[image], patch_size=28, return_tensors="np")
        height, width = (int(side) // 28 for side in tensors["image_sizes"][0])
        return dict(tensors), "[IMG_BREAK]".join([token * width] * height) + "[IMG_END]"
    tensors = images(images=[image], return_tensors="np")
    if name.startswith("gemma4"):
        return dict(tensors), f"<|image>{token * int(tensors['num_soft_tokens_per_image'][0])}<image|>"
    if name == "internvl":
        return dict(tensors), f"<img>{token * int(tensors['num_patches'][0])}</img>"
    shown = token * (int(tensors["image_grid_thw"].prod()) // 4)
    return dict(tensors), f"<|image_start|>{shown}<|image_end|>" if name.startswith("muse_") else shown


def test_images_are_as_transformers_lays_them_out(named: tuple[str, Path]) -> None:
    name, folder = named
    if name == "lfm2_vl":
        return  # below, with transformers' own classes
    processor = ImageProcessor(folder)
    for seed, (width, height) in enumerate(SIZES):
        image = picture(seed, width, height)
        if name == "mistral3" and width * height <= 28 * 28:
            continue
        tensors, text, _ = processor.prepare(image)
        expected, shown = laid_out(name, folder, image)
        assert text == shown
        for key, array in tensors.items():
            assert np.array_equal(array, expected[key]), key


def test_rows_of_pixtral_end_with_a_token(tmp_path: Path) -> None:
    processor = ImageProcessor(write_image_model(tmp_path / "model", "mistral3"))
    tensors, text, count = processor.prepare(Image.new("RGB", (84, 56)))
    assert text == "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"
    assert count == 6
    assert tensors["pixel_values"].shape == (1, 3, 56, 84)
    # Larger ones are scaled to the longest edge of its settings.
    _, text, _ = processor.prepare(Image.new("RGB", (560, 280)))
    assert text.count("[IMG]") == 4 * 2
    assert processor.prepare(Image.new("RGB", (1, 112)))[2] == 4
    for size in ((1, 113), (4000, 1)):
        with pytest.raises(ImageError, match="pixels differ too much"):
            processor.prepare(Image.new("RGB", size))


LFM2_VL: list[dict[str, Any]] = [
    {"tile_size": 56, "encoder_patch_size": 14, "min_image_tokens": 1, "max_image_tokens": 4, "max_tiles": 4},
    {},
    {"use_thumbnail": False, "max_tiles": 3, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]},
    {"do_image_splitting": False},
]


def run_oracle(folders: Iterable[Path]) -> None:
    command = [sys.executable, "-m", "tests.images.torchvision_oracle", *map(str, folders)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)


@pytest.mark.slow
def test_lfm2_vls_images_are_as_transformers_own_processor_makes_them(tmp_path: Path) -> None:
    folders = [tmp_path / str(index) for index in range(len(LFM2_VL))]
    for folder, settings in zip(folders, LFM2_VL, strict=True):
        folder.mkdir()
        own = {"image_processor_type": "Lfm2VlImageProcessor", **settings}
        (folder / "preprocessor_config.json").write_text(json.dumps(own))
        for width, height in [(1, 1), (100, 20), (640, 480), (800, 1000), (1024, 1024), (1500, 300)]:
            noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / f"{width}.png")
    run_oracle(folders)
    for folder, settings in zip(folders, LFM2_VL, strict=True):
        layout = Lfm2VlLayout(folder, None)
        # Pillow and torch round a scaled pixel alike but for one level of 256.
        level = 1.01 / 255 / min(settings.get("image_std", [0.5]))
        for file in folder.glob("*.png"):
            found, (text,) = layout._process_images([Image.open(file)])
            expected = np.load(file.with_suffix(".npz"))
            assert text == str(expected["text"])
            assert np.array_equal(found["pixel_attention_mask"], expected["pixel_attention_mask"])
            assert np.array_equal(found["spatial_shapes"], expected["spatial_shapes"])
            assert found["pixel_values"].shape == expected["pixel_values"].shape
            assert np.abs(found["pixel_values"] - expected["pixel_values"]).max() <= level


def test_what_lfm2_vl_does_not_take_is_named(tmp_path: Path) -> None:
    folder = write_image_model(tmp_path / "model", "lfm2_vl")
    with pytest.raises(ImageError, match="its sides of 1 and 3000 pixels differ too much"):
        ImageProcessor(folder).prepare(Image.new("RGB", (1, 3000)))
    change_json(folder, lambda found: found.update(tile_size="large"), "preprocessor_config.json")
    with pytest.raises(CheckpointError, match=r"its image processor cannot be loaded: .*tile_size"):
        ImageProcessor(folder)


def test_lfm2_vls_settings_in_the_processors_file(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"tile_size": 64, "do_pad": None}}))
    assert Lfm2VlSettings.of(tmp_path) == Lfm2VlSettings(tile_size=64)


@pytest.mark.slow
def test_processors_for_torchvision_alone_are_as_transformers_has_them(tmp_path: Path) -> None:
    """Their pixels within two levels of 256, which Muse-Glimmer doubles, as Pillow and torch round scaled ones."""
    types = {"gemma4_unified": "Gemma4UnifiedImageProcessor", "muse_glimmer": "MuseGlimmerImageProcessor"}
    for name, own in types.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": own}))
        for seed, (width, height) in enumerate([(1, 1), (100, 20), (640, 480), (15, 900)]):
            picture(seed, width, height).save(folder / f"{width}.png")
    run_oracle(tmp_path / name for name in types)
    for name in types:
        processor = PIL_PROCESSORS[name](tmp_path / name)
        for file in (tmp_path / name).glob("*.png"):
            found, expected = processor([Image.open(file)], return_tensors="np"), np.load(file.with_suffix(".npz"))
            for key in ("image_position_ids", "image_grid_thw"):
                assert key not in expected or np.array_equal(found[key], expected[key])
            assert found["pixel_values"].shape == expected["pixel_values"].shape
            assert np.abs(found["pixel_values"] - expected["pixel_values"]).max() <= 4.01 / 255
