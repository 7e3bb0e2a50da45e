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

CHAT = "/v1/chat/completions"

OBJECTS: list[dict[str, Any]] = [
    {"properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]},
    {"properties": {"n": {"type": "integer", "minimum": -5, "maximum": 1200}}, "required": ["n"]},
    {"properties": {"x": {"type": "number"}, "ok": {"type": "boolean"}, "no": {"type": "null"}}, "required": ["ok"]},
    {"properties": {"色": {"enum": ["赤", "青", "a\"b", "\n"]}}, "required": ["色"]},
    {"properties": {"a": {"const": {"b": [1, "c"]}}}, "required": ["a"]},
    {"properties": {"d": {"type": "string", "format": "date"}}, "required": ["d"]},
    {"properties": {"u": {"type": "string", "pattern": "^[a-f]{3}-\\d{2}$"}}, "required": ["u"]},
    {"properties": {"l": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}},
     "required": ["l"]},
    {"properties": {"t": {"type": "array", "prefixItems": [{"type": "integer"}, {"enum": ["x"]}], "items": False,
                          "minItems": 2}}, "required": ["t"]},
    {"properties": {"v": {"anyOf": [{"type": "integer"}, {"enum": ["none"]}]}}, "required": ["v"]},
    {"properties": {"v": {"type": ["integer", "null"]}}, "required": ["v"]},
    {"properties": {"o": {"type": "object", "properties": {"i": {"type": "object", "properties": {
        "j": {"type": "boolean"}}, "required": ["j"], "additionalProperties": False}}, "required": ["i"],
        "additionalProperties": False}}, "required": ["o"]},
    {"properties": {"tree": {"$ref": "#/$defs/node"}}, "required": ["tree"], "$defs": {"node": {
        "type": "object", "properties": {"v": {"enum": [1, 2]}, "next": {"anyOf": [{"$ref": "#/$defs/node"},
                                                                                  {"type": "null"}]}},
        "required": ["v", "next"], "additionalProperties": False}}},
    {"properties": {"e": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}}, "required": ["e"]},
    {"properties": {"s": {"type": "string", "minLength": 2, "maxLength": 4}}, "required": ["s"]},
]  # fmt: skip


def schemas() -> list[dict[str, Any]]:
    """More than a hundred: each alone, and pairs of them joined."""
    single = [{"type": "object", "additionalProperties": False, **one} for one in OBJECTS]
    joined = []
    for i, first in enumerate(single):
        for second in single[i + 1 :]:
            clash = set(first["properties"]) & set(second["properties"])
            if not clash and not ("$defs" in first and "$defs" in second):
                joined.append(
                    first
                    | second
                    | {
                        "properties": first["properties"] | second["properties"],
                        "required": first["required"] + second["required"],
                    }
                )
    return single + joined


def test_a_hundred_schemas(http: httpx.Client) -> None:
    """Sampled at random; every finished answer validates, and one that was cut says so."""
    tried = schemas()
    assert len(tried) > 100

    def ask(schema: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        body = chat_body(
            messages=user("Fill in the form."), max_tokens=80, temperature=1, response_format=form,
            seed=random.getrandbits(60),
        )  # fmt: skip
        answer = http.post(CHAT, json=body, timeout=300)
        assert answer.status_code == 200, (schema, answer.text)
        return schema, answer.json()["choices"][0]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, tried))
    finished = 0
    for schema, choice in answers:
        if choice["finish_reason"] == "length":
            continue
        assert choice["finish_reason"] == "stop"
        finished += 1
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    assert finished > len(tried) / 2


def test_json_object(http: httpx.Client) -> None:
    body = chat_body(messages=user("A JSON object with one short key."), response_format={"type": "json_object"})
    choice = http.post(CHAT, json=body | {"max_tokens": 200}).json()["choices"][0]
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
def test_other_forms_with_n_and_streaming(client: openai.OpenAI, form: dict[str, Any], pattern: str) -> None:
    options: dict[str, Any] = {
        "model": MODEL, "messages": user("Go."), "n": 4, "seed": 5, "max_tokens": 60, "temperature": 1.5,
        "extra_body": {"structured_outputs": form},
    }  # fmt: skip
    whole = client.chat.completions.create(**options)
    texts = [choice.message.content or "" for choice in whole.choices]
    for choice, text in zip(whole.choices, texts, strict=True):
        assert choice.finish_reason == "length" or re.fullmatch(pattern, text), text
    streamed = [""] * 4
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_older_names_and_text_completions(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "The colour is", "guided_choice": ["blue-ish", "greenish"], "max_tokens": 20}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] in ("blue-ish", "greenish")
    assert choice["finish_reason"] == "stop"


def test_ignore_eos_ends_where_the_form_does(http: httpx.Client) -> None:
    body = chat_body(structured_outputs={"regex": "abc"}, ignore_eos=True, max_tokens=50)
    choice = http.post(CHAT, json=body).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "stop")


def test_parsed_by_the_openai_client(client: openai.OpenAI) -> None:
    class Pet(pydantic.BaseModel):
        kind: str = pydantic.Field(max_length=10)
        age: int = pydantic.Field(ge=0, le=30)

    parsed = client.chat.completions.parse(
        model=MODEL, messages=user("A pet."), response_format=Pet, max_tokens=100, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Pet)


HOSTILE: list[dict[str, Any]] = [
    {"regex": "(a{1,1000}){1,1000}(b|c){500}"},
    {"regex": "((a+)+)+$" * 50},
    {"regex": "(" * 5000 + "a" + ")" * 5000},
    {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    {"grammar": "start: a\na: a a | a a a | \"x\""},
    {"json": {"anyOf": [{"pattern": f"^a{{1,{i}}}b{{{i}}}$", "type": "string"} for i in range(1, 400)]}},
    {"json": {"properties": {str(i): {"type": "string", "pattern": "(a|b)*c" * 20} for i in range(300)}}},
    {"choice": ["x" * 200] * 1000},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
]  # fmt: skip


@pytest.mark.parametrize("form", HOSTILE, ids=[json.dumps(form)[:40] for form in HOSTILE])
def test_hostile_forms_hold_up_nobody(http: httpx.Client, form: dict[str, Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(http.post, CHAT, json=chat_body(max_tokens=3))
        answer = http.post(CHAT, json=chat_body(structured_outputs=form, max_tokens=8), timeout=60)
        assert other.result(timeout=20).status_code == 200
    assert answer.status_code in (200, 400, 500), answer.text
    if answer.status_code == 500:
        assert answer.json()["error"]["code"] == "engine_error"
    assert http.post(CHAT, json=chat_body()).status_code == 200
