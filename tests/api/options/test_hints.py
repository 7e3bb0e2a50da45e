"""Every entry of the table of hints is taken, named in X-Ignored-Options and shown in docs/api.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.api.http.hints import HINTS, SERVER_TOOLS, Endpoint, Hint
from tests.api.conftest import MODEL, user
from tests.clients.random_model import write_random_model
from tests.conftest import serving

PATHS: dict[Endpoint, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "embeddings": "/v1/embeddings",
}
HEADER = "x-ignored-options"
ENTRIES = [(endpoint, hint) for hint in HINTS for endpoint in hint.endpoints]
IDS = [f"{endpoint} {hint.path}" for endpoint, hint in ENTRIES]


def body(endpoint: Endpoint) -> dict[str, Any]:
    """A request whose lists have the places that hints may stand in."""
    text = [{"type": "text", "text": "a"}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "b"}]}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    match endpoint:
        case "chat":
            return {"model": MODEL, "messages": user(text), "max_tokens": 1, "stream": True}
        case "completions":
            return {"model": MODEL, "prompt": "a", "max_tokens": 1, "stream": True}
        case "embeddings":
            return {"model": MODEL, "input": "a"}
        case "responses":
            return {"model": MODEL, "input": "a", "max_output_tokens": 1, "stream": True}
    messages = [*user(text), {"role": "assistant", "content": [call]}, *user([result, *text])]
    tools = [{"name": "f", "input_schema": {"type": "object", "properties": {}}}]
    system = [{"type": "text", "text": "c"}]
    return {"model": MODEL, "messages": messages, "tools": tools, "system": system, "max_tokens": 1}


def put(holder: Any, path: list[str], value: Any) -> None:
    """Set an option at a dotted path, in every object of a list that can hold it."""
    name = path[0].removesuffix("[]")
    if len(path) == 1:
        holder[name] = value
    elif path[0].endswith("[]"):
        for item in holder[name] if isinstance(holder.get(name), list) else []:
            put(item, path[1:], value)
    else:
        put(holder.setdefault(name, {"type": "adaptive"} if name == "thinking" else {}), path[1:], value)


def named(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [name for name in answer.headers.get(HEADER, "").split(", ") if name]


@pytest.mark.parametrize(("endpoint", "hint"), ENTRIES, ids=IDS)
def test_every_hint_is_taken_and_named(long_context: httpx.Client, endpoint: Endpoint, hint: Hint) -> None:
    asked = body(endpoint)
    put(asked, hint.path.split("."), hint.example)
    names = named(long_context.post(PATHS[endpoint], json=asked))
    assert hint.path in names
    # An option within one that is a hint itself is named beside it.
    assert set(names) <= {hint.path, hint.path.split(".")[0]}


@pytest.mark.parametrize(("endpoint", "hint"), ENTRIES, ids=IDS)
def test_values_that_ask_for_nothing_are_not_named(long_context: httpx.Client, endpoint: Endpoint, hint: Hint) -> None:
    for value in hint.neutral:
        asked = body(endpoint)
        put(asked, hint.path.split("."), value)
        assert named(long_context.post(PATHS[endpoint], json=asked)) == []


def test_the_documentation_has_the_table() -> None:
    documented = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    for hint in HINTS:
        assert f"| `{hint.path}` | {', '.join(hint.endpoints)} | {hint.reason} |" in documented, hint
    for kind in SERVER_TOOLS:
        assert f"`{kind}`" in documented


@pytest.mark.parametrize(
    ("endpoint", "change", "param"),
    [
        ("messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ("messages", {"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "tools[0].defer_loading"),
        ("messages", {"tools": [{"name": "f", "input_schema": {}, "allowed_callers": ["code"]}]},
         "tools[0].allowed_callers"),
        ("responses", {"include": ["message.output_text.logprobs"]}, "include"),
    ],
)  # fmt: skip
def test_values_that_change_the_answer_are_refused(
    long_context: httpx.Client, endpoint: Endpoint, change: dict[str, Any], param: str
) -> None:
    answer = long_context.post(PATHS[endpoint], json=body(endpoint) | change)
    assert answer.status_code == 400
    assert param in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", SERVER_TOOLS)
def test_tools_of_the_providers_server_are_dropped(long_context: httpx.Client, kind: str) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    asked = body("responses") | {"stream": False, "tools": [{"type": kind, "name": "x"}, tool]}
    assert named(long_context.post(PATHS["responses"], json=asked)) == [f"tools[].{kind}"]


UNKNOWN: list[tuple[Endpoint, dict[str, Any], str]] = [
    ("chat", {"nonsense": 1}, "nonsense"),
    ("chat", {"a b\u00e9\n": 1}, "a?b??"),
    ("chat", {"": 1}, ""),
    ("chat", {"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages[].mood"),
    ("chat", {"messages": user([{"type": "text", "text": "a", "font": 1}])}, "messages[].content[].font"),
    ("chat", {"stream_options": {"include_usage": True, "x": {"y": 1}}}, "stream_options.x"),
    ("chat", {"tools": [{"type": "function", "function": {"name": "f", "colour": "red"}}]}, "tools[].function.colour"),
    ("completions", {"nonsense": 1}, "nonsense"),
    ("responses", {"nonsense": 1}, "nonsense"),
    ("responses", {"text": {"colour": "red"}}, "text.colour"),
    ("responses", {"text": {"format": {"type": "text", "colour": "red"}}}, "text.format.colour"),
    ("responses", {"max_tokens_per_day": 1}, "max_tokens_per_day"),
    ("responses", {"tools": [{"type": "function", "name": "f", "colour": "red"}]}, "tools[].colour"),
    ("messages", {"nonsense": 1}, "nonsense"),
    ("messages", {"tools": [{"name": "f", "input_schema": {}, "colour": "red"}]}, "tools[].colour"),
]


@pytest.mark.parametrize(("endpoint", "change", "name"), UNKNOWN, ids=[name or "empty" for *_, name in UNKNOWN])
def test_unknown_fields_are_named(
    long_context: httpx.Client, endpoint: Endpoint, change: dict[str, Any], name: str
) -> None:
    assert named(long_context.post(PATHS[endpoint], json=body(endpoint) | change)) == ([name] if name else [])


def test_many_unknown_fields_make_no_long_header(long_context: httpx.Client) -> None:
    many = {f"{'x' * 500}{i}": 1 for i in range(500)} | {f"y{i}": 1 for i in range(500)}
    names = named(long_context.post(PATHS["chat"], json=body("chat") | many))
    assert len(names) == 64
    assert max(map(len, names)) <= 64


def test_names_of_other_servers(long_context: httpx.Client) -> None:
    def ask(**options: Any) -> httpx.Response:
        asked = {"model": "second-name", "messages": user("a"), "temperature": 0, "logprobs": True} | options
        return long_context.post(PATHS["chat"], json=asked)

    own = ask(max_tokens=4, repetition_penalty=1.7).json()["choices"]
    assert ask(num_predict=4, repeat_penalty=1.7).json()["choices"] == own
    assert ask(num_predict=4, max_tokens=4, repeat_penalty=1.7).json()["choices"] == own
    assert ask(max_tokens=4, repetition_penalty=1.0).json()["choices"] != own
    assert ask(max_tokens=40, format={"enum": ["yes"]}).json()["choices"][0]["message"]["content"] == '"yes"'
    grammar = ask(max_tokens=40, grammar='root ::= "no"').json()["choices"][0]["message"]["content"]
    assert grammar == "no"
    for form in ({"regex": "no"}, {"ebnf": 'root ::= "no"'}):
        assert ask(max_tokens=40, **form).json()["choices"][0]["message"]["content"] == "no"
    text = ask(max_tokens=40, json_schema='{"enum": ["no"]}').json()["choices"][0]["message"]["content"]
    assert text == '"no"'
    assert ask(max_tokens=3, min_new_tokens=4).json()["error"]["param"] == "min_new_tokens"
    for effort in ({"think": True}, {"enable_thinking": True}, {"thinking": {"type": "enabled"}}):
        assert named(ask(max_tokens=1, **effort)) == list(effort)
    assert named(ask(max_tokens=1, reasoning={"effort": "low"})) == ["reasoning"]
    assert named(ask(max_tokens=1, think=False)) == []
    for wrong, param in (
        ({"num_predict": 4, "max_tokens": 5}, "num_predict"),
        ({"num_predict": 4, "max_completion_tokens": 5}, "num_predict"),
        ({"repeat_penalty": 1.2, "repetition_penalty": 1.1}, "repeat_penalty"),
        ({"num_predict": 0}, "num_predict"),
        ({"repeat_penalty": "high"}, "repeat_penalty"),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "repeat_last_n"),
        ({"repeat_last_n": 0, "presence_penalty": 1}, "repeat_last_n"),
        ({"top_n_sigma": 1}, "top_n_sigma"),
        ({"min_keep": 2}, "min_keep"),
        ({"custom_token_bans": "5"}, "custom_token_bans"),
        ({"parse_tool_calls": 1}, "parse_tool_calls"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"reasoning": {"effort": "low", "exclude": True}}, "reasoning"),
        ({"mirostat": 2}, "mirostat"),
        ({"mirostat_mode": 2}, "mirostat_mode"),
        ({"tfs": 0.9}, "tfs"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"reasoning_format": "none"}, "reasoning_format"),
        ({"safe_prompt": True}, "safe_prompt"),
        ({"random_seed": 1, "seed": 2}, "random_seed"),
        ({"lora": [{"id": 0, "scale": 1.0}]}, "lora"),
        ({"do_sample": False}, "do_sample"),
        ({"json_schema": "{"}, "json_schema"),
        ({"thinking": {"type": "deep"}}, "thinking"),
    ):
        answer = ask(**wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        if "different things" in answer.text:
            assert all(f"'{name}'" in answer.json()["error"]["message"] for name in wrong)


# Defaults that SillyTavern, llama.cpp's page, OpenRouter's and others' clients send.
ASK_NOTHING: list[tuple[Endpoint, dict[str, Any]]] = [
    ("chat", {"top_n_sigma": 0, "min_keep": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0.0, "mirostat": False}),
    ("chat", {"typical": 1.0, "tfs": 1.0, "nsigma": 0, "mirostat_mode": 0}),
    ("chat", {"custom_token_bans": [], "banned_strings": "", "allowed_token_ids": [], "logits_processors": []}),
    ("chat", {"repeat_last_n": 64, "repeat_penalty": 1.0, "presence_penalty": 0, "max_tokens": 1}),
    ("chat", {"grammar": "", "format": "", "logit_bias": [], "seed": -1, "top_logprobs": 0, "stream": False}),
    ("chat", {"reasoning_format": "parsed", "suffix": "", "chat_template": "", "mm_processor_kwargs": {}}),
    ("completions", {"repeat_last_n": 0, "top_logprobs": 0, "chat_template": "", "seed": -1, "grammar": ""}),
    ("responses", {"parallel_tool_calls": True, "context_management": [], "seed": -1, "top_logprobs": 0.0}),
    ("messages", {"repeat_penalty": 1, "num_predict": -1, "random_seed": -1, "grammar": ""}),
    ("messages", {"parallel_tool_calls": True, "inference_geo": "global", "top_logprobs": 0}),
    ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}),
    ("messages", {"tools": [{"type": None, "name": "f", "input_schema": {}}]}),
]


@pytest.mark.parametrize(("endpoint", "options"), ASK_NOTHING, ids=[json.dumps(case)[:60] for case in ASK_NOTHING])
def test_other_servers_defaults_ask_for_nothing(
    long_context: httpx.Client, endpoint: Endpoint, options: dict[str, Any]
) -> None:
    assert named(long_context.post(PATHS[endpoint], json=body(endpoint) | options)) == []


def test_no_limit_and_no_seed(long_context: httpx.Client) -> None:
    def ask(endpoint: Endpoint, **options: Any) -> dict[str, Any]:
        asked = body(endpoint) | {"stream": False, "max_tokens": None, "temperature": 1} | options
        return dict(long_context.post(PATHS[endpoint], json=asked).json())

    for endpoint, option in (
        ("chat", "max_tokens"),
        ("chat", "max_completion_tokens"),
        ("completions", "max_tokens"),
        ("completions", "n_predict"),
    ):
        choice = ask(endpoint, **{option: -1}, guided_regex="(a b c ){20}")["choices"][0]  # beyond 16 tokens
        assert choice["finish_reason"] == "stop", (endpoint, option)
    texts = {ask("completions", seed=-1, max_tokens=8)["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1
    effort = {"effort": "low", "exclude": False, "enabled": True, "max_tokens": None}
    assert ask("chat", reasoning=effort, max_tokens=1)["choices"]


def test_response_formats_of_other_servers(long_context: httpx.Client) -> None:
    def ask(form: dict[str, Any]) -> httpx.Response:
        return long_context.post(
            PATHS["chat"], json={"model": MODEL, "messages": user("a"), "max_tokens": 40, "response_format": form}
        )

    for form in (
        {"type": "json_object", "value": {"enum": ["yes"]}},
        {"type": "json", "value": {"enum": ["yes"]}},
        {"type": "json_object", "schema": {"enum": ["yes"]}},
        {"type": "regex", "value": '"yes"'},
    ):
        assert ask(form).json()["choices"][0]["message"]["content"] == '"yes"', form
    for form, param in (
        ({"type": "json"}, "response_format.value"),
        ({"type": "regex", "value": {}}, "response_format.value"),
        ({"type": "text", "value": {}}, "response_format.value"),
        ({"type": "json_object", "schema": {}, "value": {}}, "response_format.schema"),
    ):
        assert ask(form).json()["error"]["param"] == param, form


def test_models_and_their_names(long_context: httpx.Client) -> None:
    listed = [model["id"] for model in long_context.get("/v1/models").json()["data"]]
    assert listed == [MODEL, "second-name"]
    for name, status in ((MODEL, 200), ("second-name", 200), ("dummy", 200), ("gpt-4o", 404)):
        answer = long_context.post(PATHS["completions"], json={"model": name, "prompt": "a", "max_tokens": 1})
        assert answer.status_code == status, name
        assert status == 404 or answer.json()["model"] == name


@pytest.mark.rest
def test_a_server_that_refuses_unknown_fields_and_answers_to_any_name(embedded_folder: Path, tmp_path: Path) -> None:
    config = write_random_model(tmp_path / "model", embedded_folder, {"unknown_options": "refuse", "any_model": True})
    with serving(tmp_path, config) as http:
        for endpoint, change, name in UNKNOWN:
            answer = http.post(PATHS[endpoint], json=body(endpoint) | change)
            assert answer.status_code == 400
            error = answer.json()["error"]
            if endpoint != "messages" and "?" not in name:
                assert re.sub(r"\[\d+\]", "[]", error["param"]) == name
                assert error["code"] == "unknown_parameter"
        hinted = http.post(PATHS["chat"], json=body("chat") | {"model": "anything", "keep_alive": "5m", "store": True})
        assert named(hinted) == ["keep_alive", "store"]
        log = (tmp_path / "log").read_text()
        http.post(PATHS["chat"], json=body("chat") | {"keep_alive": "5m"})
        assert log.count("the option keep_alive is ignored") == 1
        assert (tmp_path / "log").read_text().count("the option keep_alive is ignored") == 1
