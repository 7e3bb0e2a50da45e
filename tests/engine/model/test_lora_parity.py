"""Two QLoRA adapters and the base in one batch on the embedded NF4 model: what PEFT gives for each alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.config import EngineConfig, LoraModule
from server.engine.core import Engine
from server.engine.start import load_runner
from server.types import GenerateRequest, SamplingParams
from tests.adapters import ALL_PROJECTIONS, save_adapter, with_adapter
from tests.prompts import CHATS
from tests.reference import Greedy, Reference

MAX_TOKENS = 16
NEAR_TIE = 0.05
MOST_NEAR_TIES = 1
CHOSEN = CHATS[:12:2]
ADAPTERS: dict[str, dict[str, Any]] = {
    "qlora": {"r": 16, "lora_alpha": 16, "target_modules": ALL_PROJECTIONS},
    "rslora": {"r": 8, "lora_alpha": 16, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the adapters' folders."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def expected(embedded_folder: Path, adapters: Path) -> dict[tuple[str | None, int], tuple[list[int], Greedy]]:
    """By adapter and chat: the prompt's tokens and what PEFT answers."""
    reference = Reference(embedded_folder)
    base = reference.model
    answers: dict[tuple[str | None, int], tuple[list[int], Greedy]] = {}
    for seed, (name, options) in enumerate([(None, {}), *ADAPTERS.items()]):
        if name is not None:
            save_adapter(base, adapters / name, seed, 0.03, **options)
            adapted = with_adapter(base, adapters / name)
            reference.model = adapted
        for i, chat in enumerate(CHOSEN):
            prompt = reference.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
            answers[name, i] = (list(prompt), reference.greedy(chat, MAX_TOKENS))
        if name is not None:
            base = adapted.unload()
    return answers


@pytest.mark.slow  # test_lora.py compares with PEFT on small models
def test_two_adapters_and_the_base_in_one_batch(
    embedded_folder: Path, adapters: Path, expected: dict[tuple[str | None, int], tuple[list[int], Greedy]]
) -> None:
    modules = tuple(LoraModule(name=name, path=adapters / name) for name in ADAPTERS)
    config = EngineConfig(device="cpu", max_num_batched_tokens=128, lora_modules=modules)
    engine = Engine(load_runner(embedded_folder, config, lambda stage, fraction: None), config)
    for i in range(len(CHOSEN)):
        for name in (None, *ADAPTERS):
            params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
            engine.add(GenerateRequest(f"{name}/{i}", expected[name, i][0], params, name))
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
    excused = 0
    for (name, i), (_, greedy) in expected.items():
        got = found[f"{name}/{i}"]
        if got != greedy.token_ids:
            place = next(
                n for n, (ours, theirs) in enumerate(zip(got, greedy.token_ids, strict=False)) if ours != theirs
            )
            print(f"{name}/{i} differs at token {place}, margin {greedy.margins[place]:.4f}")
            assert greedy.margins[place] <= NEAR_TIE
            excused += 1
    assert excused <= MOST_NEAR_TIES
    answers = [{tuple(expected[name, i][1].token_ids) for name in (None, *ADAPTERS)} for i in range(len(CHOSEN))]
    assert sum(len(different) == 3 for different in answers) > len(CHOSEN) // 2  # the adapters matter
