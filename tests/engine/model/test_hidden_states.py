"""Embeddings are the final hidden states of last tokens, whatever else is in the batch and in the cache."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from server.checkpoint.classes import add_image_outputs
from server.config import EngineConfig, LoraModule
from server.engine.core import Engine
from server.engine.runtime.preparation.assembly import build_runner
from server.types import GenerateRequest, RequestOutput, SamplingParams
from tests.adapters import ALL_PROJECTIONS, save_adapter, with_adapter
from tests.checkpoint.layouts import config_of, random_model
from tests.checkpoint.multimodal import CLASSES
from tests.engine.factories import make_request, run_together, tokens
from tests.engine.greedy_answers import small
from tests.engine.models import tiny_model
from tests.marks import with_rest

CONFIG = EngineConfig(device="cpu", block_size=4, kv_cache_bytes=2**20, max_num_batched_tokens=32)
EAGER = CONFIG.model_copy(update={"enforce_eager": True})
FAMILIES = ("llama", "qwen3", "gemma3_text", "lfm2", "qwen3_5_text", "granitemoehybrid")
# One token, one chunk, more than two steps.
PROMPTS = [[7], list(range(3, 24)), list(range(5, 80))]


def embedding_of(prompt: list[int], request_id: str, adapter: str | None = None, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id, prompt, SamplingParams(max_tokens=1, embed=True, **sampling), adapter)


def state(output: RequestOutput) -> torch.Tensor:
    assert output.embedding is not None
    return torch.frombuffer(bytearray(output.embedding), dtype=torch.float32)


def expected(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        hidden: torch.Tensor = model.base_model(torch.tensor([prompt])).last_hidden_state[0, -1]
        return hidden


@pytest.mark.parametrize("family", with_rest(FAMILIES, ["llama", "gemma3_text", "qwen3_5_text"]))
@pytest.mark.parametrize("config", [EAGER, CONFIG], ids=["eager", "written"])
def test_states_are_those_of_transformers_beside_sequences_that_generate(family: str, config: EngineConfig) -> None:
    model = tiny_model(family)
    engine = Engine(build_runner(copy.deepcopy(model), config), config)
    generating = [make_request(prompt, f"g{i}", max_tokens=20, ignore_eos=True) for i, prompt in enumerate(PROMPTS)]
    alone = run_together(engine, *generating)
    embedding = [embedding_of(prompt, f"e{i}") for i, prompt in enumerate(PROMPTS)]
    # Twice: then the cache has the prompts' beginnings.
    for turn in range(2):
        pairs = zip(generating, embedding, strict=True)
        outputs = run_together(engine, *(request for pair in pairs for request in pair))
        for i, prompt in enumerate(PROMPTS):
            (output,) = outputs[f"e{i}"]
            assert (output.new_token_ids, output.finish_reason) == ([], "length")
            assert output.timings is not None
            assert (output.num_cached_tokens > 0) == (len(prompt) > 4), turn
            torch.testing.assert_close(state(output), expected(model, prompt), atol=1e-4, rtol=1e-4)
            assert tokens(outputs[f"g{i}"]) == tokens(alone[f"g{i}"])
    assert engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize("family", ["llama4", "llava"])
def test_states_of_multimodal_classes(family: str) -> None:
    """Llama 4's is its own base model, and its text's class has a head of its own."""
    model = random_model(config_of(family, **CLASSES[family]))
    add_image_outputs(model)
    prompt = PROMPTS[1]
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0, -1]
    for config in (EAGER, CONFIG):
        engine = Engine(build_runner(copy.deepcopy(model), config), config)
        (output,) = run_together(engine, embedding_of(prompt, "e"))["e"]
        torch.testing.assert_close(state(output), wanted, atol=1e-4, rtol=1e-4)


def test_an_adapter_changes_them_as_in_peft(tmp_path: Path) -> None:
    save_adapter(tiny_model("llama"), tmp_path / "a", 1, 0.3, r=8, target_modules=ALL_PROJECTIONS)
    config = EAGER.model_copy(update={"lora_modules": (LoraModule(name="a", path=tmp_path / "a"),)})
    engine = Engine(build_runner(tiny_model("llama"), config), config)
    prompt = PROMPTS[1]
    outputs = run_together(engine, embedding_of(prompt, "base"), embedding_of(prompt, "adapted", "a"))
    adapted = with_adapter(tiny_model("llama"), tmp_path / "a").base_model.model
    for request_id, model in (("base", tiny_model("llama")), ("adapted", adapted)):
        torch.testing.assert_close(
            state(outputs[request_id][0]), expected(model, prompt), atol=1e-4, rtol=1e-4, msg=request_id
        )
    assert not torch.allclose(state(outputs["base"][0]), state(outputs["adapted"][0]), atol=0.1)


@pytest.mark.gpu
def test_states_on_a_gpu_beside_sequences_that_generate(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    reference, model = (small("qwen3-8b", tmp_path, device) for _ in range(2))
    config = EngineConfig(
        device="cuda", max_num_seqs=8, max_num_batched_tokens=128, max_model_len=512, kv_cache_bytes=2**26
    )
    engine = Engine(build_runner(model, config), config)
    prompts = [[7], list(range(100, 150)), list(range(200, 600))]
    generating = [make_request(prompt, f"g{i}", max_tokens=20, ignore_eos=True) for i, prompt in enumerate(prompts)]
    for _ in range(2):
        embedding = [embedding_of(prompt, f"e{i}") for i, prompt in enumerate(prompts)]
        outputs = run_together(engine, *embedding, *generating)
        for i, prompt in enumerate(prompts):
            with torch.inference_mode():
                hidden = reference.base_model(torch.tensor([prompt], device=device)).last_hidden_state[0, -1].float()
            found = state(outputs[f"e{i}"][0]).to(device)
            assert torch.nn.functional.cosine_similarity(found, hidden, dim=0) > 0.999
            assert len(tokens(outputs[f"g{i}"])) == 20


def test_what_does_not_go_together_is_refused() -> None:
    engine = Engine(build_runner(tiny_model("llama"), EAGER), EAGER)
    many = GenerateRequest("many", [5, 6], SamplingParams(max_tokens=2, embed=True))
    outputs = run_together(engine, many, embedding_of([5, 6], "scored", prompt_logprobs=1))
    assert all("embeds" in str(outputs[name][0].error) for name in ("many", "scored"))
    with pytest.raises(ValueError, match="batch_invariant"):
        EngineConfig(embeddings=True, batch_invariant=True)
