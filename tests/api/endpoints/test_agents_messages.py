"""Parts of coding agents' conversations other than plain text, on /v1/messages, with a long context."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.conftest import MODEL, user
from tests.clients.random_model import CONTEXT

PATH = "/v1/messages"


def count(http: httpx.Client, messages: list[dict[str, Any]], **options: Any) -> int:
    answer = http.post(f"{PATH}/count_tokens", json={"model": MODEL, "messages": messages} | options)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["input_tokens"])


@pytest.mark.slow
def test_a_limit_that_does_not_fit_is_cut_and_a_prompt_that_does_not_fit_is_refused(long_context: httpx.Client) -> None:
    prompt = user("word " * (CONTEXT - 100))
    tokens = count(long_context, prompt)
    room = CONTEXT - tokens
    assert 0 < room < 100
    body = {"model": MODEL, "messages": prompt, "max_tokens": 32000, "temperature": 0}
    answer = long_context.post(PATH, json=body).json()
    assert (answer["usage"]["output_tokens"], answer["stop_reason"]) == (room, "max_tokens")
    refused = long_context.post(PATH, json=body | {"messages": user("word " * CONTEXT)})
    assert refused.status_code == 400
    assert "maximum context length" in refused.json()["error"]["message"]


def test_system_messages_stand_anywhere(long_context: httpx.Client) -> None:
    talk = [*user("a"), {"role": "system", "content": "b"}, {"role": "assistant", "content": "c"}, *user("d")]
    blocks = [*talk[:1], {"role": "system", "content": [{"type": "text", "text": "b"}]}, *talk[2:]]
    assert count(long_context, blocks) == count(long_context, talk) > count(long_context, [*talk[:1], *talk[2:]])


def test_documents_and_thoughts(long_context: httpx.Client) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "A text."}
    document = {"type": "document", "source": source, "title": "Title", "citations": {"enabled": False}}
    as_text = count(long_context, user("Title\nA text.\nRead it."))
    assert count(long_context, user([document, {"type": "text", "text": "Read it."}])) == as_text
    in_blocks = document | {"source": {"type": "content", "content": [{"type": "text", "text": "A text."}]}}
    assert count(long_context, user([in_blocks, {"type": "text", "text": "Read it."}])) == as_text
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document]}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    assert count(long_context, [*user("a"), {"role": "assistant", "content": [call]}, *user([result])]) > 10
    hidden = {"type": "redacted_thinking", "data": "x" * 500}
    said = {"type": "text", "text": "b"}
    talk = [*user("a"), {"role": "assistant", "content": [hidden, said]}, *user("c")]
    plain = [*user("a"), {"role": "assistant", "content": [said]}, *user("c")]
    assert count(long_context, talk) == count(long_context, plain)


@pytest.mark.parametrize("thinking", [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}])
def test_tokens_are_counted_with_thinking(long_context: httpx.Client, thinking: dict[str, Any]) -> None:
    assert count(long_context, user("a"), thinking=thinking) == count(long_context, user("a"))


def test_the_billing_header_is_no_part_of_the_prompt(long_context: httpx.Client) -> None:
    kept = [{"type": "text", "text": "Be brief."}]
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cc_entrypoint=cli;"}
    assert count(long_context, user("a"), system=[billing, *kept]) == count(long_context, user("a"), system=kept)
