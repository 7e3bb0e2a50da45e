"""POST /v1/chat/completions through the openai client, against the real server and model."""

from __future__ import annotations

import math

import httpx
import openai
import pytest

from server.text.tokenizer import Tokenizer
from tests.api.conftest import MODEL, chat_body, user

FRANCE = user("What is the capital of France?")


def test_answers_greedily(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=12)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    choice = answer.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_stream_is_the_whole_answer(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": user("Write three emojis: 😀"), "temperature": 0, "max_tokens": 10}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 10
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stream_without_usage_ends_with_done(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json=chat_body(stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line for line in answer.text.split("\n\n") if line]
    assert events[-1] == "data: [DONE]"
    assert all(event.startswith("data: {") for event in events[:-1])
    assert '"usage"' not in answer.text


def test_continuous_usage(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        **chat_body(max_tokens=3), stream=True, stream_options={"continuous_usage_stats": True}
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert counts[-1] == 3
    assert counts == sorted(counts)


def test_n_choices_with_a_seed(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": user("Tell me a story."), "n": 3, "seed": 7, "max_tokens": 8}
    first = client.chat.completions.create(**options)
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    # The k-th choice is what the seed + k gives alone.
    alone = client.chat.completions.create(**(options | {"n": 1, "seed": 8}))
    assert alone.choices[0].message.content == texts[1]
    assert first.usage is not None
    assert first.usage.completion_tokens == 24


def test_stop_string(http: httpx.Client) -> None:
    options = chat_body(messages=FRANCE, max_tokens=20)
    whole = http.post("/v1/chat/completions", json=options).json()["choices"][0]["message"]["content"]
    # Begins and ends inside words, so tokens straddle both of its ends.
    stop = whole[5:14]
    for extra, expected in (({}, whole[:5]), ({"include_stop_str_in_output": True}, whole[:14])):
        answer = http.post("/v1/chat/completions", json=options | {"stop": ["never", stop]} | extra).json()
        choice = answer["choices"][0]
        assert choice["message"]["content"] == expected
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == stop
        assert answer["usage"]["completion_tokens"] < 20


def test_stop_token_ids(http: httpx.Client, byte_tokenizer: Tokenizer) -> None:
    (token,) = byte_tokenizer.encode(" of")
    answer = http.post("/v1/chat/completions", json=chat_body(messages=FRANCE, max_tokens=9, stop_token_ids=[token]))
    choice = answer.json()["choices"][0]
    assert choice["message"]["content"] == "The capital"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_end_of_sequence_and_ignore_eos(http: httpx.Client) -> None:
    body = chat_body(messages=user("Answer with one word: yes."), max_tokens=40)
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] is None
    used = answer["usage"]["completion_tokens"]
    assert used < 40
    assert "<|im_end|>" not in answer["choices"][0]["message"]["content"]
    longer = http.post("/v1/chat/completions", json=body | {"ignore_eos": True, "max_tokens": used + 3}).json()
    assert longer["choices"][0]["finish_reason"] == "length"
    assert longer["usage"]["completion_tokens"] == used + 3
    visible = http.post("/v1/chat/completions", json=body | {"skip_special_tokens": False, "stop_token_ids": []}).json()
    assert visible["choices"][0]["finish_reason"] == "stop"
    at_least = http.post("/v1/chat/completions", json=body | {"min_tokens": used + 2}).json()
    assert at_least["usage"]["completion_tokens"] >= used + 2


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**chat_body(messages=FRANCE, max_tokens=4), logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        assert bytes(entry.bytes or []).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert sorted((top.logprob for top in entry.top_logprobs), reverse=True) == [
            top.logprob for top in entry.top_logprobs
        ]
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0001
    streamed = client.chat.completions.create(
        **chat_body(messages=FRANCE, max_tokens=4), logprobs=True, top_logprobs=3, stream=True
    )
    entries = [e for c in streamed if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert [entry.token for entry in entries] == [entry.token for entry in logprobs.content]


def test_logit_bias_forces_and_bans(http: httpx.Client, byte_tokenizer: Tokenizer) -> None:
    (token,) = byte_tokenizer.encode(" cat")
    forced = http.post("/v1/chat/completions", json=chat_body(logit_bias={str(token): 100}, max_tokens=3)).json()
    assert forced["choices"][0]["message"]["content"] == " cat cat cat"
    first = byte_tokenizer.encode(
        http.post("/v1/chat/completions", json=chat_body()).json()["choices"][0]["message"]["content"]
    )
    banned = http.post("/v1/chat/completions", json=chat_body(logit_bias={str(first[0]): -100}, max_tokens=1)).json()
    assert byte_tokenizer.encode(banned["choices"][0]["message"]["content"]) != first[:1]


def test_parts_equal_a_string(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "hi."}]
    one = http.post("/v1/chat/completions", json=chat_body(messages=user(parts))).json()
    other = http.post("/v1/chat/completions", json=chat_body(messages=user("Say\nhi."))).json()
    assert one["choices"] == other["choices"]
    # The second one finds the first in the cache.
    assert one["usage"]["total_tokens"] == other["usage"]["total_tokens"]


def test_continue_final_message(http: httpx.Client) -> None:
    messages = [*FRANCE, {"role": "assistant", "content": "The capital of France is"}]
    answer = http.post("/v1/chat/completions", json=chat_body(messages=messages, continue_final_message=True))
    assert answer.json()["choices"][0]["message"]["content"].startswith(" Paris")
    messages[-1]["prefix"] = True  # as DeepSeek's and Mistral's clients ask for it
    marked = http.post("/v1/chat/completions", json=chat_body(messages=messages))
    assert marked.json()["choices"] == answer.json()["choices"]
    assert "X-Ignored-Options" not in marked.headers


def test_service_fields_and_neutral_values_change_nothing(http: httpx.Client) -> None:
    plain = http.post("/v1/chat/completions", json=chat_body()).json()["choices"]
    fields = {
        "user": "someone", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x",
        "prompt_cache_key": "k", "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "n": None,
        "logprobs": None, "reasoning_effort": None, "modalities": ["text"], "parallel_tool_calls": True, "seed": None,
    }  # fmt: skip
    assert http.post("/v1/chat/completions", json=chat_body(**fields)).json()["choices"] == plain
    replayed = [
        {"role": "user", "content": "Say hi.", "name": None, "tool_calls": None, "refusal": None, "audio": None}
    ]
    assert http.post("/v1/chat/completions", json=chat_body(messages=replayed)).json()["choices"] == plain


def test_errors_become_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=FRANCE)
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=7)
    assert bad.value.param == "temperature"


def test_async_client_many_at_once(server_url: str) -> None:
    import asyncio

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none", timeout=60) as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(**chat_body(messages=user(f"Count to {i}."), max_tokens=6))
                    for i in range(8)
                )
            )
            return [answer.choices[0].message.content or "" for answer in answers]

    assert all(asyncio.run(ask_all()))
