"""On a GPU: prompts with images in bfloat16, over FlashInfer, written layers and decode graphs, against transformers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from server.checkpoint.loading import load_model
from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.parallel.start import load_ranks
from server.engine.runtime.preparation.assembly import build_runner
from tests.checkpoint.further_families import settings_of
from tests.checkpoint.layouts import config_of, random_model, reference_model, save_nf4, silent
from tests.engine.model.image_prompts import NEW_TOKENS, Picture, Prompt, given_to_transformers, outputs_of
from tests.engine.model.test_image_prompts import pixels, text

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
NEAR_TIE = 0.1
"""Largest distance of a token behind the likeliest one, in standard deviations of the logits, all in bfloat16."""
TOKEN = 120
# FlashInfer's kernels take heads of 64 and more.
TEXT: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 1024,
}  # fmt: skip
QWEN = {
    "text_config": TEXT
    | {"rope_parameters": {"rope_type": "default", "mrope_section": [12, 10, 10], "rope_theta": 1e4}},
    "vision_config": {"out_hidden_size": 256},
}
QWEN3_5 = {
    "text_config": TEXT
    | {"head_dim": 128, "num_hidden_layers": 6, "layer_types": ["linear_attention", "full_attention"] * 3}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    | {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        }
    },
    "vision_config": {"out_hidden_size": 256},
}  # fmt: skip
GEMMA_3 = {
    "text_config": TEXT | {"sliding_window": 40},
    "vision_config": {"image_size": 112},
    "mm_tokens_per_image": 16,
    "image_token_index": TOKEN,
}


def qwen(seed: int) -> Picture:
    """An image of 8 x 12 patches, of which each 2 x 2 are a token; the next one is of 16 x 4."""
    grid = (8, 12) if seed % 2 else (16, 4)
    count = grid[0] * grid[1]
    tensors = {"pixel_values": pixels(seed, count, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, *grid]])}
    return Picture(tensors, [122] + [TOKEN] * (count // 4) + [123])


def gemma3(seed: int) -> Picture:
    return Picture({"pixel_values": pixels(seed, 1, 3, 112, 112)}, [123] + [TOKEN] * 16 + [124])


FAMILIES: dict[str, tuple[dict[str, Any], Callable[[int], Picture]]] = {
    "qwen2_5_vl": (QWEN, qwen),
    "qwen3_vl": (QWEN, qwen),
    "qwen3_5": (QWEN3_5, qwen),
    "gemma3": (GEMMA_3, gemma3),
}
"""By model type: its configuration and its images."""


@pytest.mark.parametrize("budget", [64, 512])
@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_with_images(name: str, budget: int, tmp_path: Path) -> None:
    check_images(name, budget, tmp_path, GPU, torch.bfloat16)


@dataclass(frozen=True)
class Reference:
    """transformers' own model, on the device and in the dtype of the engine."""

    model: PreTrainedModel

    def behind(self, prompt: Prompt, answer: list[int], shown: Prompt | None = None, plain: bool = False) -> float:
        """Distance of the worst of an answer's tokens behind the likeliest one, in standard deviations of the logits.

        shown: the prompt whose images are looked at, if not its own. plain: Qwen's positions have one axis, and Gemma's
        images are read causally.
        """
        device = self.model.device
        given = given_to_transformers(self.model, shown or prompt, len(answer))
        given = {key: value.to(device) for key, value in given.items()}
        ids = torch.tensor([prompt.ids + answer], device=device)
        if plain and "mm_token_type_ids" in given:
            given["position_ids"] = torch.arange(ids.shape[1], device=device)[None]
        elif plain:
            given.pop("token_type_ids", None)
        with torch.inference_mode():
            logits = self.model(input_ids=ids, use_cache=False, **given).logits[0, len(prompt.ids) - 1 : -1].float()
        distance = logits.amax(-1) - logits.gather(-1, ids[0, len(prompt.ids) :, None])[:, 0]
        return float((distance / logits.std(-1)).max())


def check_images(
    name: str,
    budget: int,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    processes: list[subprocess.Popen[bytes]] | None = None,
) -> None:
    """Every token of the engine is the likeliest one, or nearly, of transformers' forward over prompt and answer.

    processes: those of other ranks, which are left running.
    """
    changes, picture = FAMILIES[name]
    model = random_model(config_of(name, **merged(settings_of(name), changes)), size=0.08)
    if name == "gemma3":
        # It scales embeddings by 16, and would repeat its last token whatever else it reads.
        model.get_input_embeddings().weight.data *= 0.2
    if name in ("gemma3", "qwen3_5"):
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("q_norm.weight"):
                parameter.data += 2.0  # attend to few tokens rather than to all
    save_nf4(model, folder / "model")
    config = EngineConfig(
        device=device.type, max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=512, kv_cache_bytes=2**24,
        tensor_parallel_size=len(processes or []) + 1, state_snapshot_bytes=2**24,
    )  # fmt: skip
    if processes:
        (folder / "model" / "preprocessor_config.json").write_text("{}")
        runner, _ = load_ranks(folder / "model", config, silent, print, [], processes)
    else:
        runner = build_runner(load_model(folder / "model", device, dtype, silent, towers=True), config)
    engine = Engine(runner, config)
    reference = Reference(reference_model(folder / "model", folder / "reference").to(device, dtype))
    prompts = [
        Prompt([text(1, 5), picture(1), text(2, 3), picture(2), text(3, 4)]),
        Prompt([text(4, 9)]),
        Prompt([picture(3), text(5, 90)]),  # longer than a small step
        Prompt([text(6, 57), picture(4), text(7, 2)]),  # a small step would end within the image
        Prompt([text(8, 3), picture(1)]),  # the image is the end
        Prompt([text(9, 290), picture(5), text(10, 20)]),  # FA3's kernels for long chunks, where they are
    ]
    answers = outputs_of(engine, *prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == NEW_TOKENS
        assert reference.behind(prompt, answer) <= NEAR_TIE, (prompt.ids, answer)
    # Again, with the first tokens in the KV cache and the images' features in the tower's.
    hits = engine.stats().prefix_cache_hits
    for prompt, answer in zip(prompts, outputs_of(engine, *prompts), strict=True):
        assert reference.behind(prompt, answer) <= NEAR_TIE, (prompt.ids, answer)
    assert engine.stats().prefix_cache_hits > hits
    assert runner.tower is not None
    assert runner.tower.runs == 5
    if device.type == "cuda":
        assert type(runner._paged.backend).__name__ == "CudaBackend"
        assert runner.graph_replays > 0
    # What was checked depends on the images, and on what is special about their tokens.
    others = [
        Prompt([text(1, 5), picture(11), text(2, 3), picture(12), text(3, 4)]),
        Prompt([text(8, 3), picture(11)]),
    ]
    wrong = [reference.behind(prompts[i], answers[i], shown=o) for i, o in zip((0, 4), others, strict=True)]
    shown = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if prompt.images]
    plain = [reference.behind(prompt, answer, plain=True) for prompt, answer in shown]
    assert max(wrong) > 3 * NEAR_TIE, wrong
    assert max(plain) > 3 * NEAR_TIE, plain


def merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """settings with changes, also within the parts of a configuration."""
    found = dict(settings)
    for key, value in changes.items():
        found[key] = found[key] | value if isinstance(found.get(key), dict) else value
    return found
