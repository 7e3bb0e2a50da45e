"""Images in models with layers that keep states: log-probabilities of transformers' own forward, in steps of any form."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from server.checkpoint.images import without_images
from server.checkpoint.inspection import inspect_checkpoint
from server.checkpoint.loading import load_model
from server.checkpoint.names import is_of_tower
from server.checkpoint.parts import TOWER, weight_parts
from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.runner import ModelRunner
from server.images.decoding import ImageError
from server.images.processor import ImageProcessor
from tests.api.images.image_models import picture, write_image_model
from tests.checkpoint.layouts import CPU, change_json, reference_model, save_nf4, silent
from tests.checkpoint.test_hybrids import SKIPPED, made
from tests.engine.model.image_prompts import Answer, Picture, Prompt, answers, expected, given_to_transformers
from tests.engine.model.test_image_prompts import PICTURES, qwen, text
from tests.marks import with_rest

CONFIG = EngineConfig(
    device="cpu", block_size=4, kv_cache_bytes=2**22, max_num_batched_tokens=32, state_snapshot_tokens=16
)
TOLERANCE = 3e-4
"""Two orders of float32 sums through four layers of large weights."""
FIXED_POINT = 1.2e-2
"""The same with kernels in fixed point, whose error states carry on."""


def unseen(model_type: str) -> PreTrainedModel:
    """A random model that does not answer with tokens of images, which transformers would ask features for."""
    model = made(model_type)
    with torch.no_grad():
        model.get_output_embeddings().weight[120:124] = 0
    return model


@functools.cache
def model_of(model_type: str) -> PreTrainedModel:
    return unseen(model_type)


@functools.cache
def runner_of(model_type: str, **changes: Any) -> ModelRunner:
    return build_runner(copy.deepcopy(model_of(model_type)), CONFIG.model_copy(update=changes))


@pytest.fixture(params=with_rest(["qwen3_5", "qwen3_5_moe", "lfm2_vl"], ["qwen3_5", "lfm2_vl"]))
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def check(model: PreTrainedModel, engine: Engine, *prompts: Prompt, tolerance: float = TOLERANCE) -> None:
    """The engine's tokens are the likeliest by transformers' forward of prompt and answer, and as likely."""
    for prompt, found in zip(prompts, answers(engine, *prompts), strict=True):
        ids = torch.tensor([[*prompt.ids, *found.tokens]])
        given = given_to_transformers(model, prompt, more=len(found.tokens))
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False, **given).logits[0, len(prompt.ids) - 1 : -1]
        rows = logits.log_softmax(-1)
        own = Answer(found.tokens, rows.gather(-1, torch.tensor(found.tokens)[:, None])[:, 0].tolist())
        assert found.same_as(own, tolerance), (prompt.ids, found, own)
        assert (rows.amax(-1) - torch.tensor(own.logprobs) < tolerance).all(), (prompt.ids, found, own)


def batch(model_type: str) -> list[Prompt]:
    """Eight prompts: two images in one, images at the begin, at the end and across the end of a step, and texts."""
    shown = [PICTURES[model_type](seed) for seed in range(7)]
    return [
        Prompt([text(1, 5), shown[1], text(2, 3), shown[2], text(3, 4)]),
        Prompt([text(4, 9)]),
        Prompt([shown[3], text(5, 30)]),
        Prompt([text(6, 27), shown[4], text(7, 2)]),
        Prompt([text(8, 3), shown[1]]),
        Prompt([text(9, 40)]),
        Prompt([shown[5], shown[6]]),
        Prompt([text(10, 1)]),
    ]


@pytest.mark.parametrize("eager", [True, False], ids=["transformers' layers", "written layers"])
@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
def test_chunks_may_end_anywhere_in_an_image(model_type: str, chunk: int, eager: bool) -> None:
    config = CONFIG.model_copy(update={"max_num_batched_tokens": chunk, "max_num_seqs": 1, "enforce_eager": eager})
    engine = Engine(runner_of(model_type, enforce_eager=eager), config)
    check(model_of(model_type), engine, *batch(model_type)[:5])


@pytest.mark.parametrize("eager", [True, False], ids=["transformers' layers", "written layers"])
def test_texts_and_images_in_a_batch_of_eight(model_type: str, eager: bool) -> None:
    engine = Engine(runner_of(model_type, enforce_eager=eager, max_num_seqs=8, state_snapshot_bytes=2**18), CONFIG)
    for _ in range(2):  # the second time behind prefixes that are known
        check(model_of(model_type), engine, *batch(model_type))
    assert engine.stats().state_snapshot_hits > 0


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_what_an_image_shows_matters(model_type: str) -> None:
    """And so do its rows and columns, which positions of three axes name."""
    model, shown = model_of(model_type), qwen(1)
    flat = Picture({**shown.tensors, "image_grid_thw": shown.tensors["image_grid_thw"][:, [0, 2, 1]]}, shown.tokens)
    found = [expected(model, Prompt([text(1, 5), own, text(2, 3)])) for own in (shown, qwen(3), flat)]
    assert not found[0].same_as(found[1], 10 * TOLERANCE)
    assert not found[0].same_as(found[2], 10 * TOLERANCE)


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_an_images_hash_counts_in_keys_and_in_snapshots(model_type: str) -> None:
    """A snapshot behind or within an image is found with this image, and not with another of its size."""
    engine, model = Engine(runner_of(model_type), CONFIG), model_of(model_type)

    def hits(prompt: Prompt) -> int:
        before = engine.stats().prefix_cache_hits
        check(model, engine, prompt)
        return engine.stats().prefix_cache_hits - before

    shown = [Prompt([text(1, 11), qwen(i), text(2, 16)]) for i in (2, 4, 6)]
    image, end = shown[0].images[0], (len(shown[0].ids) - 5) // 4 * 4
    assert (image.start, image.end, end) == (12, 20, 32)
    assert hits(shown[0]) == 0
    assert hits(shown[0]) == end
    # The prompt about another image leaves the first one's in front of the image, where there is a snapshot from then on.
    assert hits(shown[1]) == 0
    assert hits(shown[2]) == 12 // 4 * 4
    assert hits(Prompt([text(1, 11), qwen(2), text(3, 9)])) == 16 < image.end
    assert [hits(prompt) for prompt in shown] == [end] * 3


def test_a_conversation_about_images_goes_on_from_its_last_turn(model_type: str) -> None:
    engine, model = Engine(runner_of(model_type), CONFIG), model_of(model_type)
    parts: list[list[int] | Picture] = []
    rng, computed, new = random.Random(3), 0, 0
    for turn in range(5):
        added = [
            text(turn, rng.randint(5, 20)),
            *([PICTURES[model_type](turn)] if turn % 2 == 0 else []),
            text(turn + 50, 6),
        ]
        before, known = engine.stats().prefix_cache_hits, len(Prompt(parts).ids)
        prompt = Prompt([*parts, *added])
        check(model, engine, prompt)
        computed += len(prompt.ids) - (engine.stats().prefix_cache_hits - before)
        new += len(prompt.ids) - known
        parts = [*parts, *added]
    # At the end of each turn at most the block that the last snapshot leaves, and five tokens.
    assert computed <= new + 4 * (CONFIG.block_size - 1 + 5)


def test_many_mixed_requests_with_few_blocks(model_type: str) -> None:
    """With preemption, snapshots that go and aborted requests: answers of transformers, whatever ran before."""
    config = CONFIG.model_copy(update={"max_num_seqs": 5, "state_snapshot_bytes": 2**16})
    engine = Engine(runner_of(model_type, max_num_seqs=5, state_snapshot_bytes=2**16), config)
    engine._blocks._free = deque(range(20))
    rng = random.Random(1)
    for _ in range(4):
        prompts = []
        for _ in range(6):
            common = text(1, 12)[: rng.choice((0, 7, 12))]
            shown = [PICTURES[model_type](rng.randrange(4)) for _ in range(rng.choice((0, 1, 1, 2)))]
            prompts.append(Prompt([common, *shown, text(rng.randrange(9), rng.randint(1, 25))]))
        engine.add(prompts[0].request())
        engine.step()
        engine.abort([sequence.request_id for sequence in engine._scheduler._running])
        check(model_of(model_type), engine, *prompts)
    assert engine.stats().preemptions > 0
    assert engine.stats().state_snapshot_hits > 0


LAYOUTS: dict[str, dict[str, Any]] = {
    "NF4": {},
    "skip list": {"llm_int8_skip_modules": SKIPPED, "bnb_4bit_compute_dtype": torch.float16},
}


@pytest.mark.parametrize(
    ("layout", "eager"),
    with_rest(itertools.product(LAYOUTS, (True, False)), [("NF4", False), ("skip list", True)]),
)
def test_layouts(layout: str, eager: bool, tmp_path: Path) -> None:
    """By transformers' layers (eager) and by written ones."""
    folder = save_nf4(unseen("qwen3_5"), tmp_path / "model", **LAYOUTS[layout])
    packed = [name for name in inspect_checkpoint(folder).packed if is_of_tower(name)]
    assert (len(packed) > 0) == (layout == "NF4")
    config = CONFIG.model_copy(update={"enforce_eager": eager})
    runner = build_runner(load_model(folder, CPU, torch.float32, silent, towers=True), config)
    check(
        reference_model(folder, tmp_path / "reference"),
        Engine(runner, config),
        *batch("qwen3_5"),
        tolerance=FIXED_POINT,
    )


def test_16_bit_quantized_while_loading(tmp_path: Path) -> None:
    """With the tower, as in other families."""
    folder = tmp_path / "model"
    unseen("qwen3_5").to(torch.bfloat16).save_pretrained(folder)
    model = load_model(folder, CPU, torch.float32, silent, towers=True)
    # What it is after it was quantized, as transformers saves that and reads it again.
    packed = tmp_path / "packed"
    copy.deepcopy(model).save_pretrained(packed)
    check(reference_model(packed, tmp_path / "reference"), Engine(build_runner(model, CONFIG), CONFIG), *batch("qwen3_5"),
          tolerance=FIXED_POINT)  # fmt: skip


def test_the_tower_is_loaded_and_counted_only_if_images_are_allowed(tmp_path: Path) -> None:
    folder = write_image_model(tmp_path / "model", "qwen3_5")
    assert without_images(folder, EngineConfig()) is None
    assert without_images(folder, EngineConfig(images=False)) == "engine.images is false"
    whole = weight_parts(inspect_checkpoint(folder), 4, keeps_fp4=False)
    with_tower, without = (load_model(folder, CPU, torch.float32, silent, towers) for towers in (True, False))
    sizes = [sum(parameter.nbytes for parameter in model.parameters()) for model in (with_tower, without)]
    assert sizes[0] > sizes[1]
    assert whole[TOWER] > 0
    assert not [name for name, _ in without.named_parameters() if is_of_tower(name)]
    (folder / "preprocessor_config.json").unlink()
    reason = without_images(folder, EngineConfig())
    assert reason == "the checkpoint does not say how images are prepared (it has no preprocessor_config.json)"


def test_images_of_all_sizes(tmp_path: Path) -> None:
    """From a single pixel to a megapixel, prepared as a server does it."""
    folder = write_image_model(tmp_path / "model", "qwen3_5")
    change_json(folder, lambda c: c["text_config"].update(max_position_embeddings=2048))
    size = {"shortest_edge": 28 * 28 * 4, "longest_edge": 16777216}
    change_json(folder, lambda c: c.update(size=size), "preprocessor_config.json")
    processor = ImageProcessor(folder)
    config = CONFIG.model_copy(update={"max_num_batched_tokens": 512, "block_size": 16})
    model = load_model(folder, CPU, torch.float32, silent, towers=True)
    token = int(model.config.image_token_id)
    engine = Engine(build_runner(model, config), config)
    prompts = []
    for seed, (width, height) in enumerate([(1, 1), (2, 190), (28, 28), (333, 77), (640, 480), (1024, 1024)]):
        tensors, shown, count = processor.prepare(picture(seed, width, height))
        ids = processor._tokenizer.encode(shown, add_special_tokens=False)
        assert ids.count(token) == count
        torches = {name: torch.from_numpy(array) for name, array in tensors.items()}
        prompts.append(Prompt([text(seed, 7), Picture(torches, ids, token), text(seed + 50, 3)]))
    assert len(prompts[-1].ids) > 1300
    check(reference_model(folder, tmp_path / "reference"), engine, *prompts, tolerance=FIXED_POINT)
    with pytest.raises(ImageError, match="is not one that the model takes"):
        processor.prepare(picture(1, 1, 300))
