"""On a GPU: layers with states in decode graphs, in chunks by fla's kernels, and of sequences that are preempted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.preparation.assembly import build_runner
from tests.engine.factories import make_request, run_together, tokens
from tests.engine.models import HYBRIDS, tiny_model
from tests.engine.test_hybrids import prompt_of
from tests.engine.test_kinds_cuda import GPU, NEAR_TIE, TOKENS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

WIDE: dict[str, dict[str, Any]] = {
    "lfm2": {"hidden_size": 256, "intermediate_size": 512},
    "qwen3_5_text": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "head_dim": 64,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}
LENGTHS = (5, 60, 64, 65, 1, 200, 33, 700, 2, 130)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_answers_are_those_of_transformers(family: str, eager: bool) -> None:
    model = tiny_model(family, **WIDE[family]).to(GPU, torch.bfloat16)
    oracle = copy.deepcopy(model)
    # The KV cache holds the longest sequence and little else.
    bytes_per_token = 2 * 2 * 64 * 2
    config = EngineConfig(
        device="cuda", max_num_seqs=6, max_model_len=768, kv_cache_bytes=max(2**20, 900 * bytes_per_token),
        max_num_batched_tokens=256, enforce_eager=eager,
    )  # fmt: skip
    engine = Engine(build_runner(model, config), config)
    requests = [make_request(prompt_of(n), max_tokens=TOKENS, ignore_eos=True) for n in LENGTHS]
    outputs = run_together(engine, *requests)
    if not eager:
        assert engine.stats().graph_replays > TOKENS
    for request in requests:
        prompt, answer = request.prompt_token_ids, tokens(outputs[request.request_id])
        assert len(answer) == TOKENS
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + answer], device=GPU), use_cache=False).logits[0]
        expected = logits[len(prompt) - 1 : -1].float()
        behind = expected.amax(-1) - expected.gather(1, torch.tensor(answer, device=GPU)[:, None])[:, 0]
        assert behind.max() <= NEAR_TIE * max(1.0, float(expected.std())), (len(prompt), behind.tolist())
