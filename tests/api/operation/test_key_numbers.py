"""The engine is told the number of each request's API key, by which the shared store keeps answers apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from server.app import create_app
from server.config import Config, HttpConfig
from server.engine.supervisor.base import EngineStatus
from server.text.tokenizer import Tokenizer
from server.types import EngineReady, GenerateRequest, RequestOutput
from tests.api.conftest import MODEL, user

READY = EngineReady(
    max_model_len=512, vocab_size=49152, eos_token_ids=[2], block_size=16, num_blocks=99, device="cpu", dtype="float32",
    kernels="cpu",
)  # fmt: skip
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "one", "max_tokens": 4}
CHAT: dict[str, Any] = {"model": MODEL, "messages": user("one"), "max_tokens": 4}
BODIES = {
    "/v1/completions": TEXT,
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"model": MODEL, "input": "one", "max_output_tokens": 4},
}


class Engine:
    """Ends every request with one token when all that are expected have come, and notes the numbers of their keys."""

    def __init__(self, expected: int) -> None:
        self.adapters: dict[str, str] = {}
        self.status = EngineStatus("ready", ready=READY)
        self.found: dict[str, int | None] = {}
        self._all = asyncio.Barrier(expected)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        self.found[request.http_request_id] = request.api_key
        await self._all.wait()
        yield RequestOutput(request.request_id, [2], finish_reason="stop", stop_token_id=2)


@pytest.mark.parametrize("keys", [(), ("first", "second", "third")])
async def test_requests_carry_the_numbers_of_their_keys(keys: tuple[str, ...], byte_tokenizer: Tokenizer) -> None:
    """All at once, so that one that carried another's would be seen."""
    app = create_app(Config(http=HttpConfig(api_keys=keys)))
    asked = {f"{path}-{number}": (path, key) for path in BODIES for number, key in enumerate(keys or ("any", "other"))}
    engine = Engine(len(asked))
    service = app.state.service
    service.engine, service.tokenizer, service.grammars = engine, byte_tokenizer, SimpleNamespace()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:

        async def ask(name: str, path: str, key: str) -> None:
            headers = {"Authorization": f"Bearer {key}", "X-Request-Id": name.replace("/", ".")}
            answer = await client.post(path, json=BODIES[path], headers=headers)
            assert answer.status_code == 200, answer.text

        async with asyncio.timeout(60):
            await asyncio.gather(*(ask(name, path, key) for name, (path, key) in asked.items()))
    assert engine.found == {
        name.replace("/", "."): keys.index(key) if keys else None for name, (_, key) in asked.items()
    }
