"""POST /tokenize and /detokenize."""

from __future__ import annotations

import httpx

from server.text.tokenizer import Tokenizer
from tests.api.conftest import MODEL, user


def test_text(http: httpx.Client, byte_tokenizer: Tokenizer) -> None:
    text = "naïve 日本 <|im_end|>"
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == byte_tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["token_strs"][-1] == "<|im_end|>"
    assert answer["max_model_len"] > 1000
    assert http.post("/detokenize", json={"tokens": answer["tokens"], "model": MODEL}).json() == {"prompt": text}
    skipped = http.post("/detokenize", json={"tokens": answer["tokens"], "skip_special_tokens": True}).json()
    assert skipped == {"prompt": "naïve 日本 "}


def test_conversation_counts_as_its_usage(http: httpx.Client) -> None:
    messages = user("Say hi.")
    count = http.post("/tokenize", json={"messages": messages}).json()["count"]
    body = {"model": MODEL, "messages": messages, "max_tokens": 1}
    assert http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"] == count


def test_bad_values(http: httpx.Client) -> None:
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**9]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ):
        answer = http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (path, body)
    assert http.post("/tokenize", json={"prompt": "a", "model": "x"}).status_code == 404
    assert http.post("/tokenize", json={"prompt": "a", "x": 1}).headers["x-ignored-options"] == "x"


def test_version_and_ping(http: httpx.Client) -> None:
    assert http.get("/version").json()["version"]
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200
