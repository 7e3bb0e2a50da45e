"""Prompts with images through the engine: tokens equal to transformers' own generate()."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel

from server.checkpoint.loading import load_model
from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.runner import ModelRunner
from tests.checkpoint.further_families import settings_of, skip_unless_known
from tests.checkpoint.layouts import CPU, config_of, random_model, reference_model, save_nf4, silent
from tests.engine.model.image_prompts import TOLERANCE, Picture, Prompt, answers, expected
from tests.marks import with_rest

CONFIG = EngineConfig(device="cpu", kv_cache_bytes=2**22, enforce_eager=True, block_size=4, max_num_batched_tokens=32)
TOKEN, BREAK, END = 120, 121, 122


def pixels(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def llava(seed: int) -> Picture:
    return Picture({"pixel_values": pixels(seed, 1, 3, 28, 28)}, [TOKEN] * 4)


def llava_next(seed: int) -> Picture:
    """An image of 56 x 28 in two tiles and as a whole, whose features have a newline behind each row."""
    sizes = torch.tensor([[56, 28]])
    return Picture({"pixel_values": pixels(seed, 1, 3, 3, 28, 28), "image_sizes": sizes}, [TOKEN] * (4 + 4 * 3))


def mistral3(seed: int) -> Picture:
    """An image of 56 x 84: rows of patches that are merged by two, with a token behind each."""
    sizes = torch.tensor([[56, 84]])
    rows = [TOKEN] * 3 + [BREAK] + [TOKEN] * 3 + [END]
    return Picture({"pixel_values": pixels(seed, 1, 3, 56, 84), "image_sizes": sizes}, rows)


def qwen(seed: int) -> Picture:
    """An image of 4 x 6 patches, of which each 2 x 2 are a token; the next one is of 8 x 4."""
    grid = [4, 6] if seed % 2 else [8, 4]
    patches = pixels(seed, grid[0] * grid[1], 3 * 2 * 14 * 14)
    tensors = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, *grid]])}
    return Picture(tensors, [122] + [TOKEN] * (grid[0] * grid[1] // 4) + [123])


def gemma3(seed: int) -> Picture:
    return Picture({"pixel_values": pixels(seed, 1, 3, 28, 28)}, [123] + [TOKEN] * 4 + [124])


def idefics3(seed: int) -> Picture:
    """An image of 56 x 28 in two tiles and as a whole, the second tile's right half of padding."""
    mask = torch.ones(1, 3, 28, 28, dtype=torch.bool)
    mask[0, 1, :, 14:] = False
    rows = [BREAK, 110, TOKEN, BREAK, 111, TOKEN, 112, BREAK, 113, TOKEN, BREAK]
    tensors = {"pixel_values": pixels(seed, 1, 3, 3, 28, 28), "pixel_attention_mask": mask}
    return Picture(tensors, rows, TOKEN)


def tiles(seed: int) -> Picture:
    """An image in two or three tiles of one token each."""
    count = 3 if seed % 2 else 2
    return Picture({"pixel_values": pixels(seed, count, 3, 28, 28)}, [123] + [TOKEN] * count + [124])


def gemma4(seed: int) -> Picture:
    """An image of 6 x 3 or 3 x 9 patches, of which each 3 x 3 are a token, and patches of padding up to four tokens."""
    width, height = (6, 3) if seed % 2 else (3, 9)
    count = width * height
    places = torch.full((1, 36, 2), -1)
    places[0, :count] = torch.tensor([[i % width, i // width] for i in range(count)])
    patches = pixels(seed, 1, 36, 3 * 14 * 14).sigmoid()
    patches[0, count:] = 0
    return Picture({"pixel_values": patches, "image_position_ids": places}, [123] + [TOKEN] * (count // 9) + [124])


def lfm2_vl(seed: int) -> Picture:
    """Two tiles of 4 x 4 patches, each behind a token that names it, and the whole image, with patches of padding."""
    shapes = torch.tensor([[4, 4], [4, 4], [2, 4]])
    mask = torch.arange(16) < shapes.prod(-1)[:, None]
    patches = pixels(seed, 3, 16, 3 * 14 * 14) * mask[..., None]
    tensors = {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}
    rows = [122, 110, *[TOKEN] * 4, 111, *[TOKEN] * 4, 112, *[TOKEN] * 2, 123]
    return Picture(tensors, rows, TOKEN)


def gemma4_unified(seed: int) -> Picture:
    """An image of 3 x 2 or 2 x 4 patches, each a token, and patches of padding up to ten."""
    width, height = (3, 2) if seed % 2 else (2, 4)
    places = torch.full((1, 10, 2), -1)
    places[0, : width * height] = torch.tensor([[i % width, i // width] for i in range(width * height)])
    patches = pixels(seed, 1, 10, 3 * 42 * 42).sigmoid()
    patches[0, width * height :] = 0
    tensors = {"pixel_values": patches, "image_position_ids": places}
    return Picture(tensors, [123] + [TOKEN] * (width * height) + [124])


PICTURES: dict[str, Callable[[int], Picture]] = {
    "llava": llava,
    "llava_next": llava_next,
    "mistral3": mistral3,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gemma4, whole": gemma4,
    "gemma4_unified": gemma4_unified,
    "muse_glimmer": qwen,
    "muse_spark": qwen,
    "idefics3": idefics3,
    "smolvlm": idefics3,
    "qwen2_vl": qwen,
    "qwen2_5_vl": qwen,
    "qwen3_vl": qwen,
    "qwen3_vl_moe": qwen,
    "qwen3_5": qwen,
    "qwen3_5_moe": qwen,
    "lfm2_vl": lfm2_vl,
    "glm4v": qwen,
    "glm46v": qwen,
    "glm4v_moe": qwen,
    "internvl": tiles,
    "aya_vision": tiles,
}
# Kernels in fixed point are off by 1e-4 of the logits' norm in other models; states carry it on.
TOLERANCES = {"qwen3_5": 1.2e-2, "qwen3_5_moe": 1.2e-2}
GEMMA_4: dict[str, object] = {"image_token_id": TOKEN, "video_token_id": 125, "audio_token_id": 126}
SETTINGS: dict[str, dict[str, object]] = {
    "llava": {"image_token_index": TOKEN},
    "llava_next": {"image_token_index": TOKEN, "image_grid_pinpoints": [[56, 28], [28, 56]]},
    "mistral3": {"image_token_index": TOKEN},
    # Windows end within images.
    "gemma3": {
        "image_token_index": TOKEN,
        "text_config": {**settings_of("gemma3")["text_config"], "sliding_window": 3},
    },
    # The small ones have inputs for each layer, the large ones images whose tokens see one another.
    "gemma4": {
        **GEMMA_4,
        "text_config": {**settings_of("gemma4")["text_config"], "vocab_size_per_layer_input": 128},
    },
    "gemma4, whole": {
        **GEMMA_4,
        "text_config": {
            **settings_of("gemma4")["text_config"],
            "use_bidirectional_attention": "vision",
            "sliding_window": 2,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
    },
    # A layer without a window comes first, so that it matters what its image tokens see. The image's six or eight see one
    # another past the window.
    "gemma4_unified": {
        **GEMMA_4,
        "text_config": {
            **settings_of("gemma4_unified")["text_config"],
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 3,
            "per_layer_config": {layer: {"head_dim": 32} for layer in ("0", "2")},
        },
    },
    # Of a size in which no two tokens are equally likely but for rounding.
    "muse_glimmer": {
        "image_token_id": TOKEN,
        "video_token_id": 125,
        "text_config": {**settings_of("muse_glimmer")["text_config"], "intermediate_size": 128},
    },
    "muse_spark": {"image_token_id": TOKEN, "video_token_id": 125, "audio_token_id": 126},
    # With all experts of four, or rounding would choose others.
    "qwen3_vl_moe": {"text_config": {**settings_of("qwen3_vl_moe")["text_config"], "num_experts_per_tok": 4}},
    "qwen3_5_moe": {"text_config": {**settings_of("qwen3_5_moe")["text_config"], "num_experts_per_tok": 8}},
}


@dataclass(frozen=True)
class Served:
    """A model as the engine has it, and as transformers has it."""

    name: str
    runner: ModelRunner
    reference: PreTrainedModel

    def picture(self, seed: int) -> Picture:
        return PICTURES[self.name](seed)

    def engine(self, **changes: object) -> Engine:
        return Engine(self.runner, CONFIG.model_copy(update=changes))

    def check(self, engine: Engine, *prompts: Prompt) -> None:
        """The engine answers to prompts that are sent at once as transformers does to each alone."""
        for prompt, found in zip(prompts, answers(engine, *prompts), strict=True):
            wanted = expected(self.reference, prompt)
            assert found.same_until_tie(wanted, TOLERANCES.get(self.name, TOLERANCE)), (prompt.ids, found, wanted)


# Features at once and in layers, tokens that see one another, positions of three axes, states.
QUICK = ("llava_next", "gemma4, whole", "qwen3_vl", "qwen3_5")


@pytest.fixture(scope="module", params=with_rest(PICTURES, QUICK))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    model_type = name.partition(",")[0]
    skip_unless_known(model_type)
    config = config_of(model_type, **{**settings_of(model_type), **SETTINGS.get(name, {})})
    save_nf4(random_model(config), folder / "model")
    model = load_model(folder / "model", CPU, torch.float32, silent, towers=True)
    return Served(name, build_runner(model, CONFIG), reference_model(folder / "model", folder / "reference"))


def text(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 118), k=count)


def test_one_image(served: Served) -> None:
    prompt = Prompt([[3, 17, 42], served.picture(1), [9, 11]])
    served.check(served.engine(), prompt)
    # It matters which one it is.
    other = Prompt([[3, 17, 42], served.picture(3), [9, 11]])
    assert not expected(served.reference, other).same_as(expected(served.reference, prompt))


def test_several_images_and_text_in_one_batch(served: Served) -> None:
    prompts = [
        Prompt([text(1, 5), served.picture(1), text(2, 3), served.picture(2), text(3, 4)]),
        Prompt([text(4, 9)]),
        Prompt([served.picture(3), text(5, 30)]),  # longer than a step
        Prompt([text(6, 27), served.picture(4), text(7, 2)]),  # the step would end within the image
        Prompt([text(8, 3), served.picture(1)]),  # the image is the end
        Prompt([text(9, 40)]),
    ]
    served.check(served.engine(), *prompts)


def test_equal_prompts_share_their_prefix_and_different_images_do_not(served: Served) -> None:
    engine = served.engine()
    first = Prompt([text(1, 6), served.picture(1), text(2, 9)])
    served.check(engine, first)
    hits = engine.stats().prefix_cache_hits
    longer = Prompt([text(1, 6), served.picture(1), text(2, 9), served.picture(3), text(3, 3)])
    served.check(engine, longer)
    shared = engine.stats().prefix_cache_hits - hits
    has_states = served.runner.states is not None  # of which there is a snapshot near the prompt's end
    assert shared == (len(first.ids) - 5 if has_states else len(first.ids)) // 4 * 4
    # The same text about another image of the same size: nothing from the image's first block on is shared.
    served.check(engine, Prompt([text(1, 6), served.picture(3), text(2, 9)]))
    place = first.images[0].start
    assert engine.stats().prefix_cache_hits - hits - shared == (0 if has_states else place // 4 * 4)


def test_a_prefix_that_ends_within_an_image(served: Served) -> None:
    """The rest of the image is computed with what the cache has of it."""
    engine = served.engine()
    for count in range(1, 5):
        served.check(engine, Prompt([text(1, count), served.picture(1)]), Prompt([text(2, 3)]))
        served.check(engine, Prompt([text(1, count), served.picture(1)]))


def test_the_tower_runs_once_an_image(served: Served) -> None:
    tower = served.runner.tower
    assert tower is not None
    begun = tower.runs
    engine = served.engine(enable_prefix_caching=False)
    picture = served.picture(77)
    prompts = [Prompt([text(i, 20 + i), picture, text(50 + i, 5)]) for i in range(4)]
    served.check(engine, *prompts)
    assert tower.runs - begun == 1


@pytest.mark.parametrize("caching", [False, True])
def test_preempted_sequences_compute_their_images_again(served: Served, caching: bool) -> None:
    engine = served.engine(enable_prefix_caching=caching)
    # Prompts fill whole blocks, so that every sequence needs two more for its answer, of which each gets one.
    pictures = {i: served.picture(i) for i in (1, 3, 5)}
    prompts = [Prompt([text(i, 12 + -(14 + len(p.tokens)) % 4), p, text(i, 2)]) for i, p in pictures.items()]
    engine._blocks._free = deque(range(sum(-(-len(prompt.ids) // 4) for prompt in prompts) + 3))
    served.check(engine, *prompts)
    assert engine.stats().preemptions > 0
