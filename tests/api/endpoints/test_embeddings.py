"""/v1/embeddings on a small random model with sentence-transformers' files, against transformers' hidden states."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from server.checkpoint.loading import load_model
from tests.api.conftest import metric, openai_client
from tests.conftest import RunningServer, start_server
from tests.reference import expand_linears

pytestmark = pytest.mark.rest

MODEL = "embedder"
PATH = "/v1/embeddings"
SIZE = 64
TEXTS = ["The capital of France", "Paris", "日本の首都は東京です。 " * 20]
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


def write_model(folder: Path, source: Path) -> PreTrainedModel:
    """Put an embedding model into a folder: no lm_head, an end-of-text token behind every text."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    for file in source.iterdir():
        if file.name not in ("config.json", "generation_config.json", "model.safetensors"):
            (folder / file.name).write_bytes(file.read_bytes())
    document = json.loads((folder / "tokenizer.json").read_text())
    end = tokenizer.eos_token
    special = {"id": end, "ids": [tokenizer.eos_token_id], "tokens": [end]}
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end, "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {end: special},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    config = AutoConfig.from_pretrained(source)
    del config.quantization_config
    config.update({"hidden_size": SIZE, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
                   "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": False})  # fmt: skip
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder, state_dict={k: v for k, v in model.state_dict().items() if k != "lm_head.weight"})
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": SIZE, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True,
               "include_prompt": True}  # fmt: skip
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return model


@pytest.fixture(scope="module")
def folder(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedder")
    write_model(folder, embedded_folder)
    return folder


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Iterator[RunningServer]:
    engine = {"kv_cache_bytes": 100_000_000, "max_model_len": 1000}
    settings = {"model": str(folder), "served_model_name": MODEL, "engine": engine, "http": {"max_queue": 8}}
    with start_server(folder / "log", config=settings) as running:
        yield running


@pytest.fixture(scope="module")
def http(embedder: RunningServer) -> Iterator[httpx.Client]:
    with embedder.client() as client:
        yield client


def ask(http: httpx.Client, text: Any, **options: Any) -> list[Any]:
    answer = http.post(PATH, json={"model": MODEL, "input": text} | options)
    assert answer.status_code == 200, answer.text
    document = answer.json()
    assert [entry["index"] for entry in document["data"]] == list(range(len(document["data"])))
    return [entry["embedding"] for entry in document["data"]]


def test_they_are_the_normalised_states_of_the_last_token(http: httpx.Client, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_model(folder, torch.device("cpu"), torch.float32, lambda *_: None)
    expand_linears(model)
    for text, found in zip(TEXTS, ask(http, TEXTS), strict=True):
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id
        with torch.inference_mode():
            state = model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]
        wanted = state / state.norm()
        torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-3, rtol=1e-3)
        assert math.isclose(math.hypot(*found), 1, abs_tol=1e-5)
        # Both alone: the order of sums depends on how many tokens a step has.
        assert ask(http, ids)[0] == pytest.approx(ask(http, text)[0], abs=1e-6)


def test_formats_dimensions_and_usage(http: httpx.Client) -> None:
    whole = ask(http, TEXTS[0])[0]
    packed = base64.b64decode(ask(http, TEXTS[0], encoding_format="base64")[0])
    assert torch.frombuffer(bytearray(packed), dtype=torch.float32).tolist() == pytest.approx(whole, abs=1e-6)
    short = ask(http, TEXTS[0], dimensions=16)[0]
    length = math.hypot(*whole[:16])
    assert short == pytest.approx([value / length for value in whole[:16]], abs=1e-5)
    answer = http.post(PATH, json={"model": MODEL, "input": [[5, 6], [7]], "user": "me", "surprise": 1})
    document = answer.json()
    assert answer.headers["x-ignored-options"] == "surprise, user"
    assert document["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert (document["object"], document["model"], document["data"][0]["object"]) == ("list", MODEL, "embedding")


def test_more_inputs_than_the_queue_holds_by_the_openai_client(embedder: RunningServer, http: httpx.Client) -> None:
    before = metric(http, "nf4_prompt_tokens_total")
    texts = [f"number {i}" for i in range(40)]
    with openai_client(embedder.base_url) as client:
        # The client asks for base64 on its own.
        found = client.embeddings.create(model=MODEL, input=texts)
    assert [len(entry.embedding) for entry in found.data] == [SIZE] * 40
    assert found.data[17].embedding == pytest.approx(ask(http, texts[17])[0], abs=1e-4)
    assert metric(http, "nf4_prompt_tokens_total") - before >= found.usage.prompt_tokens
    assert metric(http, "nf4_num_requests_running") == 0


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"input": []}, "input", "empty_array"),
        ({"input": ""}, "input", None),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": ["a", 5]}, "input[1]", "invalid_type"),
        ({"input": [10**9]}, "input[0]", "value_out_of_range"),
        ({"input": "a " * 2000}, "input", "context_length_exceeded"),
        ({"input": ["a"] * 3000}, "input", "value_out_of_range"),
        ({"dimensions": 0}, "dimensions", None),
        ({"dimensions": SIZE + 1}, "dimensions", "value_out_of_range"),
        ({"encoding_format": "hex"}, "encoding_format", None),
        ({"input_type": "query"}, "input_type", "unsupported_parameter"),
        ({"late_chunking": True}, "late_chunking", "unsupported_parameter"),
        ({"embedding_type": "float", "output_dtype": "int8"}, "output_dtype", "unsupported_parameter"),
        ({"normalize": False}, "normalize", "unsupported_parameter"),
    ],
)
def test_bad_input_is_named(http: httpx.Client, options: dict[str, Any], param: str, code: str | None) -> None:
    answer = http.post(PATH, json={"model": MODEL, "input": "a"} | options)
    if options == {"input": ""}:  # the end-of-text token stands for it
        assert answer.status_code == 200
        return
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert code is None or answer.json()["error"]["code"] == code


def test_a_model_that_is_none_says_what_to_do(server: RunningServer) -> None:
    body = {"model": "smollm2-135m-instruct", "input": "a"}
    answer = httpx.post(f"{server.base_url}{PATH}", json=body, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "embeddings_off")
    assert "engine.embeddings: true" in answer.json()["error"]["message"]
