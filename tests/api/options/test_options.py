"""Options against what they have to do, on a server whose model thinks and has keys, and on the usual one."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
import torch

from tests.api.conftest import MODEL, chat_body, user
from tests.reference import Reference

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def message(client: httpx.Client, **options: Any) -> dict[str, Any]:
    answer = client.post(CHAT, json=chat_body(max_tokens=8, **options))
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0]["message"])


def test_thoughts_are_split_off_whole_and_streamed(thinking: httpx.Client) -> None:
    whole = message(thinking)
    assert whole["reasoning_content"] == whole["reasoning"]
    assert whole["reasoning_content"]
    assert not whole["content"]
    streamed = thinking.post(CHAT, json=chat_body(max_tokens=8, stream=True)).text
    deltas = [
        json.loads(line[6:])["choices"][0]["delta"] for line in streamed.splitlines() if line.startswith("data: {")
    ]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == whole["reasoning_content"]
    assert not any(delta.get("content") for delta in deltas)


def test_stop_strings_do_not_end_thoughts(thinking: httpx.Client) -> None:
    thoughts = message(thinking)["reasoning_content"]
    for cut in (thoughts[2:5], thoughts[-3:]):
        answer = thinking.post(CHAT, json=chat_body(max_tokens=8, stop=[cut])).json()["choices"][0]
        assert (answer["message"]["reasoning_content"], answer["finish_reason"]) == (thoughts, "length")
    # What is a special token ends them, as it does any text.
    bias = {"1": 100}
    for stop in (["<|im_start|>"], ["<|im_start|><|im_start|>"]):
        answer = thinking.post(CHAT, json=chat_body(max_tokens=8, stop=stop, logit_bias=bias)).json()
        assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", stop[0])
        assert answer["usage"]["completion_tokens"] == stop[0].count("<")
    whole = {"model": MODEL, "prompt": "Hi", "max_tokens": 6, "temperature": 0, "logit_bias": bias}
    for options in ({}, {"skip_special_tokens": False}):
        choice = thinking.post(TEXT, json=whole | {"stop": "<|im_start|>"} | options).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "<|im_start|>")


def test_tokens_of_thoughts_are_counted(thinking: httpx.Client) -> None:
    def usage(**options: Any) -> dict[str, Any]:
        answer = thinking.post(CHAT, json=chat_body(**options))
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["usage"])

    thought = usage(max_tokens=8)
    assert thought["completion_tokens_details"] == {"reasoning_tokens": thought["completion_tokens"]}
    plain = usage(max_tokens=8, chat_template_kwargs={"enable_thinking": False})
    assert plain["completion_tokens_details"] == {"reasoning_tokens": 0}
    stream = thinking.post(
        CHAT, json=chat_body(max_tokens=8, stream=True, stream_options={"include_usage": True})
    ).text.splitlines()
    assert json.loads([line for line in stream if line][-2][6:])["usage"] == thought
    body = {"model": MODEL, "input": "Hi", "max_output_tokens": 8, "temperature": 0}
    counted = thinking.post("/v1/responses", json=body).json()["usage"]
    assert counted["output_tokens_details"] == {"reasoning_tokens": counted["output_tokens"]}
    assert counted["output_tokens"] == 8


def test_settings_of_thinking(thinking: httpx.Client) -> None:
    hidden = message(thinking, include_reasoning=False)
    assert "reasoning_content" not in hidden
    assert "reasoning" not in hidden
    for option in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        plain = message(thinking, **option)
        assert plain["content"]
        assert "reasoning_content" not in plain
    assert message(thinking, reasoning_effort="low")["reasoning_content"]


def test_a_form_follows_the_thoughts(thinking: httpx.Client) -> None:
    body = chat_body(max_tokens=24, structured_outputs={"regex": "yes|no"}, logit_bias={"2": -100})
    answer = thinking.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["message"]["reasoning_content"]
    assert choice["finish_reason"] == "length" or choice["message"]["content"].strip() in ("yes", "no")
    body["chat_template_kwargs"] = {"enable_thinking": False}
    assert thinking.post(CHAT, json=body).json()["choices"][0]["message"]["content"] in ("yes", "no")


def test_template_settings_reach_the_prompt(thinking: httpx.Client) -> None:
    def count(**options: Any) -> int:
        answer = thinking.post("/tokenize", json={"messages": user("Say hi."), **options}).json()
        return int(answer["count"])

    assert count(chat_template_kwargs={"style": "Rhyme, please."}) > count()
    assert count(add_generation_prompt=False) < count(chat_template_kwargs={"enable_thinking": False}) < count()


def test_a_request_may_take_so_long_and_a_key_have_so_many(thinking: httpx.Client) -> None:
    # Sampled: a model of random weights may repeat a token that has no text.
    options = {"temperature": 1, "ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}}
    slow, limit = chat_body(max_tokens=60000, **options), {"X-Request-Timeout": "3"}
    with thinking.stream("POST", CHAT, json=slow | {"stream": True}, headers=limit) as answer:
        lines = answer.iter_lines()
        next(lines)
        second = thinking.post(CHAT, json=chat_body())
        assert (second.status_code, second.json()["error"]["code"]) == (429, "key_limit")
        assert second.headers["retry-after"]
        last = [line for line in lines if line][-2:]
    assert '"timeout"' in "".join(last)
    assert thinking.post(CHAT, json=chat_body()).status_code == 200


def test_limits_of_length_by_both_names(http: httpx.Client) -> None:
    for options in ({"max_tokens": 3}, {"max_tokens": None, "max_completion_tokens": 3}):
        answer = http.post(CHAT, json=chat_body(messages=user("Count to ten."), **options)).json()
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["finish_reason"] == "length"


def test_older_names_of_forms(http: httpx.Client) -> None:
    forms: list[tuple[dict[str, Any], str]] = [
        ({"guided_regex": "[xyz]{3}"}, "[xyz]{3}"),
        ({"guided_json": {"enum": ["only"]}}, '"only"'),
        ({"guided_grammar": 'root ::= "a" | "b"'}, "[ab]"),
        ({"guided_choice": ["blue-ish", "greenish"]}, "blue-ish|greenish"),
    ]
    for form, pattern in forms:
        chat = http.post(CHAT, json=chat_body(max_tokens=20, **form)).json()["choices"][0]["message"]["content"]
        body = {"model": MODEL, "prompt": "It is", "max_tokens": 20} | form
        text = http.post(TEXT, json=body).json()["choices"][0]["text"]
        assert re.fullmatch(pattern, chat), (form, chat)
        assert re.fullmatch(pattern, text), (form, text)


def test_logprobs_are_the_references_whatever_the_sampling(http: httpx.Client, reference: Reference) -> None:
    ids = reference.tokenizer("My favourite animal is")["input_ids"]
    body = {"model": MODEL, "prompt": ids, "max_tokens": 8, "logprobs": 20, "temperature": 1.3, "top_k": 5, "seed": 6}
    logprobs = http.post(TEXT, json=body).json()["choices"][0]["logprobs"]
    chosen = http.post("/tokenize", json={"prompt": "".join(logprobs["tokens"])}).json()["tokens"]
    assert len(chosen) == 8
    with torch.inference_mode():
        expected = reference.model(torch.tensor([ids + chosen])).logits[0].log_softmax(-1)[len(ids) - 1 : -1]
    for place, token in enumerate(chosen):
        assert logprobs["token_logprobs"][place] == pytest.approx(float(expected[place, token]), abs=1e-2)
        best = sorted(logprobs["top_logprobs"][place].values(), reverse=True)[:20]
        assert best == pytest.approx(expected[place].topk(20).values.tolist(), abs=1e-2)
