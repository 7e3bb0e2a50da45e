"""A server that speculates by lookup: the same answers in every form as one that does not, and what it says of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.conftest import MODEL, user
from tests.conftest import serving

pytestmark = pytest.mark.rest

TEXT = "one fish, two fish, red fish, blue fish, " * 4
# Copying is worth speculation on any machine.
AGAIN: dict[str, Any] = {
    "model": MODEL,
    "messages": user(f"Repeat this text again and again, word for word: {TEXT}"),
    "max_tokens": 40,
    "temperature": 0,
    "timings": True,
}


@pytest.fixture(scope="module")
def speculating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("speculating"), {"engine": {"speculation": "lookup"}}) as client:
        yield client


def ask(client: httpx.Client, path: str = "/v1/chat/completions", **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def counted(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(rf"nf4_spec_decode_num_{name}_total[{{ ]", line))


def ask_until_accepted(
    client: httpx.Client, path: str = "/v1/chat/completions", **body: Any
) -> tuple[Any, tuple[float, float]]:
    """An answer with accepted draft tokens, how many draft tokens the metrics count for it, and how many accepted ones.

    On a busy machine draft tokens may cost more than they save for a while, and then there are none.
    """
    for _ in range(30):
        before = counted(client, "draft_tokens"), counted(client, "accepted_tokens")
        answer = ask(client, path, **body)
        after = counted(client, "draft_tokens"), counted(client, "accepted_tokens")
        if after[1] > before[1]:
            return answer, (after[0] - before[0], after[1] - before[1])
    pytest.fail("no draft token was accepted where a text repeats itself")


def test_answers_are_those_without_and_say_how_many_were_accepted(
    http: httpx.Client, speculating: httpx.Client
) -> None:
    plain = ask(http, **AGAIN)
    drafted_answer, (drafted, accepted) = ask_until_accepted(speculating, **AGAIN)
    (expected,), (got,) = plain["choices"], drafted_answer["choices"]
    assert got["message"] == expected["message"]
    assert got["finish_reason"] == expected["finish_reason"]
    timings = got["timings"]
    assert timings["draft_tokens"] >= timings["accepted_tokens"] > 0
    assert (expected["timings"]["draft_tokens"], expected["timings"]["accepted_tokens"]) == (0, 0)
    assert drafted_answer["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert drafted_answer["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": timings["accepted_tokens"],
        "rejected_prediction_tokens": timings["draft_tokens"] - timings["accepted_tokens"],
    }
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert (timings["draft_tokens"], timings["accepted_tokens"]) == (drafted, accepted)
    assert counted(speculating, "accepted_tokens_per_pos") == counted(speculating, "accepted_tokens")


def test_a_request_may_do_without(speculating: httpx.Client) -> None:
    before = counted(speculating, "draft_tokens")
    text = {"model": MODEL, "prompt": TEXT, "max_tokens": 30, "temperature": 0, "speculation": False}
    answers = [ask(speculating, **AGAIN, speculation=False), ask(speculating, "/v1/completions", **text)]
    document = {"model": MODEL, "input": AGAIN["messages"][0]["content"], "max_output_tokens": 30, "temperature": 0}
    ask(speculating, "/v1/responses", **document, speculation=False)
    assert counted(speculating, "draft_tokens") == before
    assert answers[0]["choices"][0]["timings"]["draft_tokens"] == 0
    ask_until_accepted(speculating, "/v1/completions", **(text | {"speculation": True}))
    wrong = speculating.post("/v1/chat/completions", json=AGAIN | {"speculation": "no"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "speculation")
