"""previous_response_id, where responses are kept; bounds, keys, and a server that keeps none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.api.answering.response_store import ResponseStore
from server.api.http.errors import ApiError
from tests.api.conftest import MODEL
from tests.clients.random_model import write_random_model
from tests.conftest import start_server

PATH = "/v1/responses"


@pytest.fixture(scope="module")
def keeping(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("keeping")
    config = write_random_model(folder, embedded_folder, {"response_store": 3, "api_keys": ["one", "two"]})
    with (
        start_server(folder / "log", "--config", str(config)) as server,
        httpx.Client(base_url=server.base_url, timeout=60, trust_env=False, headers={"x-api-key": "one"}) as http,
    ):
        yield http


def ask(http: httpx.Client, **options: Any) -> dict[str, Any]:
    answer = http.post(PATH, json={"model": MODEL, "max_output_tokens": 4, "temperature": 0} | options)
    assert answer.status_code == 200, answer.text
    assert "x-ignored-options" not in answer.headers
    return dict(answer.json())


def test_a_response_is_gone_on_from(keeping: httpx.Client) -> None:
    first = ask(keeping, input="a", store=True)
    assert first["store"] is True
    assert keeping.get(f"{PATH}/{first['id']}").json() == first
    second = ask(keeping, input="b", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    items = [{"role": "user", "content": "a"}, *first["output"], {"role": "user", "content": "b"}]
    whole = ask(keeping, input=items, store=False)
    assert whole["store"] is False
    assert keeping.get(f"{PATH}/{whole['id']}").status_code == 404
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    third = ask(keeping, input="c", previous_response_id=second["id"])
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
    assert keeping.delete(f"{PATH}/{second['id']}").json()["deleted"] is True
    assert keeping.delete(f"{PATH}/{second['id']}").status_code == 404


def test_a_streamed_response_is_kept_and_the_oldest_makes_room(keeping: httpx.Client) -> None:
    first = ask(keeping, input="a")
    body = {"model": MODEL, "input": "a", "max_output_tokens": 2, "stream": True}
    name = keeping.post(PATH, json=body).text.split('"id":"', 1)[1].split('"', 1)[0]
    assert keeping.get(f"{PATH}/{name}").json()["id"] == name
    for _ in range(2):
        ask(keeping, input="a")
    gone = keeping.post(PATH, json={"model": MODEL, "input": "b", "previous_response_id": first["id"]})
    error = gone.json()["error"]
    assert (gone.status_code, error["param"], error["code"]) == (
        400, "previous_response_id", "previous_response_not_found",
    )  # fmt: skip


def test_another_key_does_not_find_it(keeping: httpx.Client) -> None:
    name = ask(keeping, input="a")["id"]
    assert keeping.get(f"{PATH}/{name}").status_code == 200
    assert keeping.get(f"{PATH}/{name}", headers={"x-api-key": "two"}).status_code == 404
    assert keeping.delete(f"{PATH}/{name}", headers={"x-api-key": "two"}).status_code == 404


def test_bytes_are_bounded() -> None:
    store = ResponseStore(100, max_bytes=1000)
    for i in range(10):
        store.keep(None, ["x" * 300], {"id": str(i), "output": []})
    assert store.find(None, "9", None).items == ["x" * 300]
    with pytest.raises(ApiError):
        store.find(None, "6", None)
    store.keep(None, ["x" * 2000], {"id": "large", "output": []})
    assert store.find(None, "9", None)
