"""Answers that keep to a form: schemas of many kinds, regexes, choices, grammars; streamed, several at once, with tools."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.api.conftest import MODEL, chat_body, user
from tests.api.options.schemas import ALL

CHAT = "/v1/chat/completions"


def test_schemas_of_all_kinds(long_context: httpx.Client) -> None:
    """Sampled at random; every finished answer validates, and one that was cut says so."""

    def ask(name: str) -> tuple[str, int, dict[str, Any]]:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ALL[name], "strict": True}}
        body = chat_body(
            messages=user("Fill in the form."), max_tokens=100, temperature=1, response_format=form,
            seed=random.getrandbits(60),
        )  # fmt: skip
        answer = long_context.post(CHAT, json=body, timeout=300)
        assert answer.status_code == 200, (name, answer.text)
        document = answer.json()
        return name, document["usage"]["completion_tokens"], document["choices"][0]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, ALL))
    finished = 0
    for name, tokens, choice in answers:
        if choice["finish_reason"] == "length":
            assert tokens == 100
            continue
        assert choice["finish_reason"] == "stop"
        finished += 1
        jsonschema.validate(json.loads(choice["message"]["content"]), ALL[name], cls=jsonschema.Draft202012Validator)
    assert finished > 0.8 * len(ALL)


def test_json_object(long_context: httpx.Client) -> None:
    body = chat_body(messages=user("A JSON object with one short key."), response_format={"type": "json_object"})
    choice = long_context.post(CHAT, json=body | {"max_tokens": 80}).json()["choices"][0]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"[A-Z]{2}\d{3}/x"}, r"[A-Z]{2}\d{3}/x"),
        ({"choice": ["red", "green apple", "日本"]}, "red|green apple|日本"),
        ({"grammar": 'start: "a"{2} (" " B){1,3}\nB: /[bc]+d/'}, "aa( [bc]+d){1,3}"),
        ({"grammar": 'root ::= "n" digit digit\ndigit ::= [0-9]'}, r"n\d\d"),
        ({"json": {"enum": [1, "two"]}}, '1|"two"'),
    ],
)
def test_other_forms_with_n_and_streaming(quick: openai.OpenAI, form: dict[str, Any], pattern: str) -> None:
    options: dict[str, Any] = {
        "model": MODEL, "messages": user("Go."), "n": 4, "seed": 5, "max_tokens": 60, "temperature": 1.5,
        "extra_body": {"structured_outputs": form},
    }  # fmt: skip
    whole = quick.chat.completions.create(**options)
    texts = [choice.message.content or "" for choice in whole.choices]
    for choice, text in zip(whole.choices, texts, strict=True):
        assert choice.finish_reason == "length" or re.fullmatch(pattern, text), text
    streamed = [""] * 4
    for chunk in quick.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def json_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def tool(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"guided_choice": ["yes", "j_\U00063988"]}, "guided_choice"),
        ({"response_format": json_format({"enum": ["\U00063988"]})}, "response_format"),
        ({"tools": [tool({"\U00063988": {"type": "integer"}})], "tool_choice": "required"}, "tools"),
        # That nothing can follow shows after the first letter.
        ({"structured_outputs": {"regex": "[ab]\U00063988"}, "n": 2}, "structured_outputs"),
    ],
)
def test_characters_that_the_vocabulary_lacks(http: httpx.Client, options: dict[str, Any], param: str) -> None:
    answer = http.post(CHAT, json=chat_body(**options, max_tokens=20))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"].split(".")[0]) == ("invalid_grammar", param)
    assert "U+63988" in error["message"] or f"'{error['param']}'" in error["message"]


def test_ignore_eos_ends_where_the_form_does(http: httpx.Client) -> None:
    body = chat_body(structured_outputs={"regex": "abc"}, ignore_eos=True, max_tokens=50)
    choice = http.post(CHAT, json=body).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "stop")


def test_parsed_by_the_openai_client(quick: openai.OpenAI) -> None:
    class Pet(pydantic.BaseModel):
        kind: str = pydantic.Field(max_length=10)
        age: int = pydantic.Field(ge=0, le=30)

    parsed = quick.chat.completions.parse(
        model=MODEL, messages=user("A pet."), response_format=Pet, max_tokens=100, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Pet)
