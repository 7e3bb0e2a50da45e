"""On a GPU: adapters of models with layers that keep states, in decode graphs and in chunks, with the base in one batch."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.preparation.assembly import build_runner
from server.types import GenerateRequest
from tests.adapters import with_adapter
from tests.engine.factories import make_request, run_together, tokens
from tests.engine.hybrids import prompt_of
from tests.engine.model.test_lora_hybrids import ADAPTERS, save_adapters
from tests.engine.test_hybrids_cuda import oracle_of
from tests.engine.test_kinds_cuda import GPU, NEAR_TIE

pytestmark = pytest.mark.gpu
LENGTHS = (5, 64, 300)
TOKENS = 24


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_answers_are_the_best_tokens_of_peft(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = oracle_of(family, monkeypatch)
    config = EngineConfig(
        device="cuda", max_num_seqs=8, max_model_len=512, kv_cache_bytes=2**22, max_num_batched_tokens=128,
        lora_modules=save_adapters(oracle, tmp_path),
    )  # fmt: skip
    engine = Engine(build_runner(copy.deepcopy(oracle), config), config)
    asked = []
    for name in (None, *ADAPTERS):
        for length in LENGTHS:
            made = make_request(prompt_of(length), f"{name} {length}", max_tokens=TOKENS, ignore_eos=True)
            asked.append(GenerateRequest(made.request_id, made.prompt_token_ids, made.sampling, name))
    outputs = run_together(engine, *asked)
    assert engine.stats().graph_replays > TOKENS
    for name in (None, *ADAPTERS):
        model = oracle if name is None else with_adapter(copy.deepcopy(oracle), tmp_path / name)
        behind = []
        for length in LENGTHS:
            prompt, answer = prompt_of(length), tokens(outputs[f"{name} {length}"])
            assert len(answer) == TOKENS, outputs[f"{name} {length}"]
            with torch.inference_mode():
                ids = torch.tensor([prompt + answer], device=GPU)
                expected = model(input_ids=ids, use_cache=False).logits[0, length - 1 : -1].float()
            chosen = expected.gather(1, torch.tensor(answer, device=GPU)[:, None])[:, 0]
            behind.append((expected.amax(-1) - chosen) / expected.std(-1))
        # Rounding in bfloat16 moves a few tokens by more than a near tie.
        assert float((torch.cat(behind) <= NEAR_TIE).float().mean()) > 0.95, name
    texts = [[tokens(outputs[f"{name} {length}"]) for length in LENGTHS] for name in (None, *ADAPTERS)]
    assert texts[0] != texts[1] != texts[2]
