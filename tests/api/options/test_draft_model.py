"""A server with a draft model of its own checkpoint folder: the same answers, and one line where the folder does not fit."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.api.conftest import MODEL, metric, user
from tests.conftest import serving

pytestmark = pytest.mark.rest


@pytest.fixture(scope="module")
def draft_folder(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model in 16 bit, with the embedded model's tokenizer."""
    folder: Path = tmp_path_factory.mktemp("draft")
    config = LlamaConfig(
        vocab_size=49152, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, tie_word_embeddings=True, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).half().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_folder / name, folder)
    return folder


def test_answers_are_those_without(http: httpx.Client, draft_folder: Path, tmp_path: Path) -> None:
    options = {"model": MODEL, "messages": user("What is the capital of France?"), "max_tokens": 24, "temperature": 0}
    expected = http.post("/v1/chat/completions", json=options).json()["choices"][0]
    with serving(tmp_path, {"engine": {"speculation": "draft", "draft_model": str(draft_folder)}}) as drafting:
        got = drafting.post("/v1/chat/completions", json=options | {"timings": True}).json()["choices"][0]
        counted = metric(drafting, "nf4_spec_decode_num_draft_tokens_total")
    assert (got["message"], got["finish_reason"]) == (expected["message"], expected["finish_reason"])
    assert counted == got["timings"]["draft_tokens"] > 0
