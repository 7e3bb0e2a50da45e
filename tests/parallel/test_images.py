"""Prompts with images, computed by several ranks of which the first has the image tower: the answers of one rank."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit

from server.checkpoint.loading import load_model
from server.checkpoint.sharding.sharded import load_shard
from server.checkpoint.sharding.shards import Shard
from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.parallel.start import load_ranks
from server.engine.runtime import exchange
from tests.checkpoint.layouts import CPU, config_of, random_model, save_nf4, silent
from tests.checkpoint.multimodal import CLASSES, divisible
from tests.checkpoint.test_hybrids import MODELS
from tests.engine.factories import run_together
from tests.engine.model.image_prompts import TOLERANCE, Answer, Prompt, answers
from tests.engine.model.test_image_prompts import PICTURES, SETTINGS, TOLERANCES, text
from tests.parallel.test_hybrids import OTHERS, SIZES

# Positions by axis.
QUICK = ("qwen2_5_vl",)
NAMES = [name for name in PICTURES if name in (*CLASSES, "qwen3_5", "lfm2_vl")]


def settings_of(name: str) -> dict[str, Any]:
    """Settings of a class whose text model can be divided."""
    if name in CLASSES:
        changes = {key: value for key, value in SETTINGS.get(name, {}).items() if key != "text_config"}
        return {**divisible(name), **changes}
    settings = copy.deepcopy(MODELS[name])
    settings["text_config"] |= SIZES | OTHERS["lfm2" if name == "lfm2_vl" else name]
    settings["vision_config"] |= {"out_hidden_size": SIZES["hidden_size"]} if name == "qwen3_5" else {}
    return settings


def save(name: str, folder: Path) -> Path:
    """A small checkpoint of a class in NF4 that says that images are prepared."""
    save_nf4(random_model(config_of(name, **settings_of(name))), folder)
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


def failed(reason: str, fatal: bool) -> None:
    raise AssertionError(reason)


def answered(folder: Path, name: str, ranks: int) -> tuple[list[Answer], Engine]:
    """Answers of an engine of several ranks to prompts with images and without."""
    config = EngineConfig(
        device="cpu", kv_cache_bytes=2**22, enforce_eager=True, block_size=4, max_num_batched_tokens=32, threads=ranks,
        tensor_parallel_size=ranks,
    )  # fmt: skip
    runner, workers = load_ranks(folder, config, silent, failed, [])
    picture = PICTURES[name]
    try:
        engine = Engine(runner, config)
        first = [text(1, 6), picture(1), text(2, 9)]
        found = answers(
            engine,
            Prompt([text(1, 5), picture(1), text(2, 3), picture(2), text(3, 4)]),
            Prompt([text(4, 9)]),
            Prompt([picture(3), text(5, 30)]),  # longer than a step
            Prompt([text(6, 27), picture(4), text(7, 2)]),  # the step would end within the image
            Prompt([text(9, 40)]),
        )
        found += answers(engine, Prompt([*first]))
        hits = engine.stats().prefix_cache_hits
        found += answers(engine, Prompt([*first, picture(3), text(3, 3)]), Prompt([text(4, 9)]))
        assert engine.stats().prefix_cache_hits > hits
        # An image that cannot be read fails its request, and no rank waits for it.
        request = Prompt([text(1, 3), picture(5)]).request()
        Path(request.images[0].file).unlink()
        outputs = run_together(engine, request, Prompt([text(8, 5)]).request(max_tokens=2))
        assert outputs[request.request_id][-1].finish_reason == "error"
        assert "a prepared image cannot be read" in str(outputs[request.request_id][-1].error)
        found += answers(engine, Prompt([text(8, 3), picture(1)]))
    finally:
        if workers is not None:
            workers.end()
            exchange.leave()
    return found, engine


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES],
)
def test_several_ranks_answer_as_one(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path / "model")
    one, _ = answered(folder, name, 1)
    several, engine = answered(folder, name, 2)
    for index, (expected, found) in enumerate(zip(one, several, strict=True)):
        assert found.same_as(expected, TOLERANCES.get(name, TOLERANCE)), (index, found, expected)
    stats = engine.stats()
    assert stats.images_computed > 0
    assert stats.image_feature_hits > 0


def test_one_rank_has_the_tower(tmp_path: Path) -> None:
    folder = save("llava", tmp_path / "model")
    first, second = (
        load_shard(folder, CPU, torch.float32, silent, Shard(rank, 2), towers=rank == 0).model for rank in (0, 1)
    )
    assert {name for name, _ in second.named_parameters()} < {name for name, _ in first.named_parameters()}
    assert first.model.vision_tower is not None
    assert second.model.vision_tower is None


def test_towers_are_kept_as_they_are_saved(tmp_path: Path) -> None:
    """In NF4 or in 16 bit, also where the text is quantized while it is loaded."""
    packed = save("gemma3", tmp_path / "packed")
    plain = tmp_path / "packed-16bit"  # what save_nf4() quantizes
    for folder, is_packed in ((packed, True), (plain, False)):
        whole = load_model(folder, CPU, torch.float32, silent, towers=True)
        shard = load_shard(folder, CPU, torch.float32, silent, Shard(0, 2), towers=True).model
        theirs = dict(whole.model.vision_tower.named_modules())
        layers = [(n, m) for n, m in shard.model.vision_tower.named_modules() if isinstance(m, torch.nn.Linear)]
        assert all(isinstance(layer, Linear4bit) == isinstance(theirs[name], Linear4bit) for name, layer in layers)
        assert any(isinstance(layer, Linear4bit) for _, layer in layers) == is_packed
        assert isinstance(shard.get_decoder().layers[0].mlp.up_proj, Linear4bit)
        # On CPUs with AVX512-BF16 bitsandbytes would repack them, and these layers are too small for that.
        for layer in (*whole.modules(), *shard.modules()):
            if isinstance(layer, Linear4bit):
                layer.support_avx512bf16_for_cpu = False
        pixels = PICTURES["gemma3"](1).tensors["pixel_values"]
        found, expected = (each.get_image_features(pixels, return_dict=True).pooler_output for each in (shard, whole))
        torch.testing.assert_close(found, expected)
