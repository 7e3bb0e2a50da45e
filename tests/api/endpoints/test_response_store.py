"""previous_response_id, where responses are kept; bounds, keys, and a server that keeps none."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server.api.answering.response_store import ResponseStore
from server.api.http.errors import ApiError
from tests.api.conftest import MODEL

PATH = "/v1/responses"


def ask(http: httpx.Client, **options: Any) -> dict[str, Any]:
    answer = http.post(PATH, json={"model": MODEL, "max_output_tokens": 4, "temperature": 0} | options)
    assert answer.status_code == 200, answer.text
    assert "x-ignored-options" not in answer.headers
    return dict(answer.json())


def test_a_response_is_gone_on_from(thinking: httpx.Client) -> None:
    first = ask(thinking, input="a", store=True)
    assert first["store"] is True
    assert thinking.get(f"{PATH}/{first['id']}").json() == first
    second = ask(thinking, input="b", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    items = [{"role": "user", "content": "a"}, *first["output"], {"role": "user", "content": "b"}]
    whole = ask(thinking, input=items, store=False)
    assert whole["store"] is False
    assert thinking.get(f"{PATH}/{whole['id']}").status_code == 404
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    third = ask(thinking, input="c", previous_response_id=second["id"])
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
    assert thinking.delete(f"{PATH}/{second['id']}").json()["deleted"] is True
    assert thinking.delete(f"{PATH}/{second['id']}").status_code == 404


def test_a_streamed_response_is_kept_and_the_oldest_makes_room(thinking: httpx.Client) -> None:
    first = ask(thinking, input="a")
    body = {"model": MODEL, "input": "a", "max_output_tokens": 2, "stream": True}
    name = thinking.post(PATH, json=body).text.split('"id":"', 1)[1].split('"', 1)[0]
    assert thinking.get(f"{PATH}/{name}").json()["id"] == name
    assert thinking.get(f"{PATH}/{name}?stream=true").json()["error"]["param"] == "stream"
    for _ in range(2):
        ask(thinking, input="a")
    gone = thinking.post(PATH, json={"model": MODEL, "input": "b", "previous_response_id": first["id"]})
    error = gone.json()["error"]
    assert (gone.status_code, error["param"], error["code"]) == (
        400, "previous_response_id", "previous_response_not_found",
    )  # fmt: skip


def test_another_key_does_not_find_it(thinking: httpx.Client) -> None:
    name = ask(thinking, input="a")["id"]
    assert thinking.get(f"{PATH}/{name}").status_code == 200
    assert thinking.get(f"{PATH}/{name}", headers={"x-api-key": "other"}).status_code == 404
    assert thinking.delete(f"{PATH}/{name}", headers={"x-api-key": "other"}).status_code == 404


def test_bytes_are_bounded() -> None:
    store = ResponseStore(100, max_bytes=1000)
    for i in range(10):
        store.keep(None, ["x" * 300], {"id": str(i), "output": []})
    assert store.find(None, "9", None).items == ["x" * 300]
    with pytest.raises(ApiError):
        store.find(None, "6", None)
    store.keep(None, ["x" * 2000], {"id": "large", "output": []})
    assert store.find(None, "9", None)
