"""LoRA adapters in the engine: what PEFT computes with each, for many adapters in one batch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from server.checkpoint.base import CheckpointError
from server.config import EngineConfig, LoraModule
from server.engine.core import Engine
from server.engine.runtime.model import lora
from server.engine.runtime.model.lora import adding_masked
from server.engine.runtime.preparation.assembly import build_runner
from server.types import GenerateRequest, LoadAdapter, SamplingParams
from tests.adapters import ALL_PROJECTIONS, change_adapter, save_adapter, with_adapter
from tests.engine.models import tiny_model

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16, "target_modules": ALL_PROJECTIONS},
    "attention": {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "patterns": {
        "r": 2,
        "lora_alpha": 8,
        "target_modules": ["k_proj", "down_proj", "up_proj"],
        "rank_pattern": {"down_proj": 5},
        "alpha_pattern": {"layers.1.self_attn.k_proj": 20},
    },
}
PROMPTS = [[5, 9, 3, 17, 4, 44, 23], [5, 9, 3, 17, 4, 44, 23, 8, 8, 91], [60, 61], list(range(3, 60))]
TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for each of ADAPTERS."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        save_adapter(tiny_model("llama"), folder / name, seed, 0.3, **options)
    return folder


def expected(model: PreTrainedModel | PeftModel, prompt: list[int], found: list[int]) -> list[int]:
    """The model's likeliest tokens after the prompt and after each of found: found itself if that is its greedy answer."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *found[:-1]]]), use_cache=False).logits
    return logits[0, len(prompt) - 1 :].argmax(-1).tolist()


def config_with(folder: Path, *names: str, **options: Any) -> EngineConfig:
    modules = tuple(LoraModule(name=name, path=folder / name) for name in names)
    settings = {"device": "cpu", "kv_cache_bytes": 2**22, "enforce_eager": True, "max_num_batched_tokens": 32}
    return EngineConfig(lora_modules=modules, **{**settings, **options})


def engine_with(folder: Path, names: list[str], family: str = "llama", **options: Any) -> Engine:
    config = config_with(folder, *names, **options)
    return Engine(build_runner(tiny_model(family), config), config)


def start(engine: Engine, request_id: str, prompt: list[int], adapter: str | None, tokens: int = TOKENS) -> None:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    engine.add(GenerateRequest(request_id, prompt, sampling, adapter))


def finish(engine: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.finish_reason != "error", output.error
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
    return found


def oracle(folder: Path, name: str | None, family: str = "llama", **overrides: Any) -> PreTrainedModel | PeftModel:
    """PEFT with one of folder's adapters; None: the base alone."""
    model = tiny_model(family, **overrides)
    return model if name is None else with_adapter(model, folder / name)


def check_answers(engine: Engine, folder: Path, *names: str, **model: Any) -> None:
    """All prompts with each adapter and without, in one batch, get what PEFT computes for each alone."""
    # Neighbours in the batch differ in their adapters.
    for i, prompt in enumerate(PROMPTS):
        for name in (None, *names):
            start(engine, f"{name} {i}", prompt, name)
    found = finish(engine)
    for name in (None, *names):
        peft = oracle(folder, name, **model)
        for i, prompt in enumerate(PROMPTS):
            answer = found[f"{name} {i}"]
            assert len(answer) == TOKENS
            assert answer == expected(peft, prompt, answer)
    assert any(found[f"{names[0]} {i}"] != found[f"None {i}"] for i in range(len(PROMPTS)))


@pytest.mark.parametrize(("eager", "few"), [(True, lora.FEW), (False, lora.FEW), (True, 0), (True, 10**6)])
def test_adapters_and_base_in_one_batch(folder: Path, eager: bool, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """few: how many tokens go row by row."""
    monkeypatch.setattr(lora, "FEW", few)
    check_answers(engine_with(folder, list(ADAPTERS), enforce_eager=eager), folder, *ADAPTERS)


def test_the_prefix_cache_keeps_adapters_apart(folder: Path) -> None:
    prompt = list(range(3, 60))
    engine = engine_with(folder, ["all", "attention"], block_size=4)
    for turn in range(2):
        for name in (None, "all", "attention"):
            start(engine, f"{name} {turn}", prompt, name)
            outputs = [output for _ in range(TOKENS + 2) for output in engine.step().outputs]
            found = [token for output in outputs for token in output.new_token_ids]
            assert len(found) == TOKENS
            assert found == expected(oracle(folder, name), prompt, found)
            assert (outputs[0].num_cached_tokens > 0) == (turn == 1)


def test_load_replace_and_unload_while_sequences_run(folder: Path) -> None:
    engine = engine_with(folder, [], allow_runtime_lora=True, max_loras=2)
    adapters = engine._runner.adapters
    assert adapters is not None
    long = 4 * TOKENS

    def load(name: str, source: str) -> str | None:
        adapters.read(LoadAdapter(name, str(folder / source)))
        while True:
            if results := engine.settle_adapters():
                return results[0].error
            if engine.has_work:
                outputs.extend(engine.step().outputs)

    outputs: list[Any] = []
    prompt = PROMPTS[0]
    start(engine, "base", prompt, None, long)
    assert load("x", "all") is None
    start(engine, "old", prompt, "x", long)
    assert load("x", "attention") is None  # replaced while "old" runs with what it was
    start(engine, "new", prompt, "x", TOKENS)
    full = load("y", "patterns")
    assert full is not None
    assert "max_loras (2)" in full
    adapters.remove("x")
    with pytest.raises(ValueError, match="'x' is not loaded"):
        adapters.get("x")
    while engine.has_work:
        outputs.extend(engine.step().outputs)
    assert load("y", "patterns") is None
    start(engine, "y", prompt, "y", TOKENS)
    while engine.has_work:
        outputs.extend(engine.step().outputs)
    found: dict[str, list[int]] = {}
    for output in outputs:
        found.setdefault(output.request_id, []).extend(output.new_token_ids)
    sources = {"base": None, "old": "all", "new": "attention", "y": "patterns"}
    for request_id, source in sources.items():
        answer = found[request_id][:TOKENS]
        assert len(answer) == TOKENS
        assert answer == expected(oracle(folder, source), prompt, answer)


def test_an_unknown_adapter_is_an_error_of_that_request_only(folder: Path) -> None:
    engine = engine_with(folder, ["all"])
    start(engine, "bad", [3, 4], "nobody")
    start(engine, "good", [3, 4], "all")
    outputs = [output for _ in range(TOKENS + 2) for output in engine.step().outputs]
    assert next(o.error for o in outputs if o.request_id == "bad") == "the adapter 'nobody' is not loaded"
    assert sum(len(o.new_token_ids) for o in outputs if o.request_id == "good") == TOKENS


def test_a_graphs_gemms_add_what_is_not_masked(folder: Path) -> None:
    engine = engine_with(folder, list(ADAPTERS))
    linear, _ = engine._runner.adapters._table._modules["model.layers.0.mlp.up_proj"]
    x = torch.randn(1, 4, linear.in_features)
    others = torch.tensor([[True, True, True], [False, True, True], [True, True, False], [True, True, True]])
    with torch.inference_mode():
        base = linear(x)
        with adding_masked(others):
            added = (linear(x) - base)[0]
    wanted = torch.zeros_like(added)
    for row, slot in ((1, 0), (2, 2)):
        wanted[row] = x[0, row] @ linear.a[slot].T @ linear.b[slot]
    assert float(wanted[1].norm()) > 0
    torch.testing.assert_close(added, wanted, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_other_shapes_is_refused(folder: Path, tmp_path: Path) -> None:
    changed = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 65)}
    change_adapter(shutil.copytree(folder / "attention", tmp_path / "bad"), lambda tensors: tensors | changed)
    with pytest.raises(CheckpointError, match="takes 65 and gives 64 features, the model's 64 and 64"):
        engine_with(tmp_path, ["bad"])


def test_other_bases_and_ranks_are_refused(folder: Path, tmp_path: Path) -> None:
    deep = tiny_model("llama", num_hidden_layers=5)
    save_adapter(deep, tmp_path / "deep", 0, r=2, target_modules=["o_proj"])
    with pytest.raises(CheckpointError, match=r"no projection 'model.layers.3.self_attn.o_proj'; it is another base's"):
        engine_with(tmp_path, ["deep"])
    with pytest.raises(CheckpointError, match=r"rank 8 is above engine.max_lora_rank \(4\)"):
        engine_with(folder, ["all"], max_lora_rank=4)
    with pytest.raises(CheckpointError, match="No such file"):
        engine_with(tmp_path, ["nothing"])


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gemma4_text", "phi3", "phi"])
def test_families(family: str, tmp_path: Path) -> None:
    save_adapter(tiny_model(family), tmp_path / "a", 0, 0.3, r=4, target_modules="all-linear")
    check_answers(engine_with(tmp_path, ["a"], family), tmp_path, "a", family=family)
