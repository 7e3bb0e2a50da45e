"""echo of /v1/completions, its log-probabilities against transformers' own."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from tests.api.conftest import MODEL
from tests.reference import Reference

PATH = "/v1/completions"
PROMPT = "The capital of France is Paris. 日本の首都は東京です。 " * 12


def body(**options: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "echo": True} | options


def test_log_probabilities_are_those_of_transformers(http: httpx.Client, reference: Reference) -> None:
    """A prompt longer than a step (256 tokens); asked twice, as the second time its blocks are in the cache."""
    ids = reference.tokenizer(PROMPT)["input_ids"]
    assert len(ids) > 300
    with torch.inference_mode():
        expected = reference.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    for _ in range(2):
        logprobs = http.post(PATH, json=body(logprobs=2, max_tokens=0)).json()["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert len(logprobs["tokens"]) == len(ids)
        for i, token in enumerate(ids[1:], start=1):
            assert logprobs["token_logprobs"][i] == pytest.approx(float(expected[i - 1, token]), abs=1e-2)
            best = max(logprobs["top_logprobs"][i].values())
            assert best == pytest.approx(float(expected[i - 1].max()), abs=1e-2)


def test_text_whole_and_streamed(http: httpx.Client) -> None:
    short: dict[str, Any] = body(prompt=PROMPT[:100])
    whole = http.post(PATH, json=short | {"logprobs": 0, "n": 2}).json()
    plain = http.post(PATH, json=short | {"echo": False}).json()["choices"][0]["text"]
    for choice in whole["choices"]:
        assert choice["text"] == short["prompt"] + plain
        assert len(choice["logprobs"]["tokens"]) == whole["usage"]["prompt_tokens"] + 3
    with http.stream("POST", PATH, json=short | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == short["prompt"] + plain


def test_the_prompt_alone(http: httpx.Client) -> None:
    answer = http.post(PATH, json=body(max_tokens=0, prompt=["a b", "c"])).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a b", "c"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 0


def test_prompts_of_ids_and_others_meanwhile(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    with ThreadPoolExecutor(4) as pool:
        scored = [pool.submit(http.post, PATH, json=body(prompt=ids, logprobs=1, max_tokens=1)) for _ in range(2)]
        plain = [pool.submit(http.post, PATH, json=body(echo=False)) for _ in range(2)]
    first = scored[0].result().json()["choices"][0]
    assert first["text"].startswith(PROMPT)
    values = scored[1].result().json()["choices"][0]["logprobs"]["token_logprobs"]
    assert values[1:] == pytest.approx(first["logprobs"]["token_logprobs"][1:], abs=1e-3)
    assert len({answer.result().json()["choices"][0]["text"] for answer in plain}) == 1


def test_prompt_logprobs(http: httpx.Client, reference: Reference) -> None:
    """vLLM's shape: by token id, the token and the likeliest ones, with their ranks."""
    ids = reference.tokenizer(PROMPT)["input_ids"][:40]
    with torch.inference_mode():
        expected = reference.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    options = body(prompt=[ids, ids[:3]], echo=False, prompt_logprobs=3, max_tokens=1)
    choices = http.post(PATH, json=options).json()["choices"]
    for choice, length in zip(choices, (40, 3), strict=True):
        scores = choice["prompt_logprobs"]
        assert (len(scores), scores[0], choice["logprobs"]) == (length, None, None)
        for place, entry in enumerate(scores[1:]):
            row, token = expected[place], ids[place + 1]
            assert 3 <= len(entry) <= 4
            own = entry[str(token)]
            assert own["logprob"] == pytest.approx(float(row[token]), abs=1e-2)
            # Another order of additions may swap neighbours.
            assert own["rank"] == pytest.approx(int((row > row[token]).sum()) + 1, rel=0.05, abs=1)
            assert own["decoded_token"] == reference.tokenizer.decode([token]) or "\ufffd" in own["decoded_token"]
            assert sorted(e["rank"] for e in entry.values())[:3] == [1, 2, 3]
    assert "prompt_logprobs" not in http.post(PATH, json=body(max_tokens=1)).json()["choices"][0]
    fewer = http.post(PATH, json=options | {"prompt": ids, "echo": True, "logprobs": 1}).json()["choices"][0]
    assert all(len(top) <= 2 for top in fewer["logprobs"]["top_logprobs"][1:])
    assert len(fewer["prompt_logprobs"]) == 40


def test_prompt_logprobs_of_a_chat(http: httpx.Client) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "prompt_logprobs": 0}
    answer = http.post("/v1/chat/completions", json=chat | {"n": 2}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in answer["prompt_logprobs"][1:])
