"""Clients of the running server."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from server.text.tokenizer import Tokenizer
from tests.clients.random_model import write_random_model
from tests.conftest import RunningServer, serving

if TYPE_CHECKING:
    from tests.api.pages.browser import Page

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def long_context(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server with a small random model that has 65536 tokens of context."""
    folder = tmp_path_factory.mktemp("long_context")
    with serving(folder, write_random_model(folder, embedded_folder)) as client:
        yield client


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai_client(server.base_url) as client:
        yield client


@pytest.fixture(scope="session")
def quick(long_context: httpx.Client) -> Iterator[openai.OpenAI]:
    """A client of the same server, for tests of forms that any model has to keep to."""
    with openai_client(str(long_context.base_url).rstrip("/")) as client:
        yield client


# Thoughts are opened by the template, unless it is told not to think; what else it is told stands in the prompt.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{{ style or '' }}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}{% endif %}{# </think> #}"
)


@pytest.fixture(scope="session")
def thinking(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a small random model whose template opens thoughts, on a server with keys that keeps three responses."""
    folder = tmp_path_factory.mktemp("thinking")
    http = {"api_keys": ["key", "other"], "max_requests_per_key": 1, "response_store": 3}
    config = write_random_model(folder, embedded_folder, http)
    (folder / "chat_template.jinja").write_text(THINKING)
    with serving(folder, config, headers={"x-api-key": "key"}) as client:
        yield client


def openai_client(base_url: str, **options: Any) -> openai.OpenAI:
    os.environ.setdefault("NO_PROXY", "127.0.0.1")
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=60, **options)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def chat_body(**options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": user("Say hi."), "max_tokens": 2, "temperature": 0} | options


def metric(http: httpx.Client, name: str, **labels: str) -> float:
    """Value of one sample of /metrics; 0 if it is not there (yet)."""
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    for line in http.get("/metrics").text.splitlines():
        head, _, value = line.rpartition(" ")
        sample, _, rest = head.partition("{")
        if sample == name and wanted <= set(rest.rstrip("}").split(",")):
            return float(value)
    return 0.0


@pytest.fixture(scope="session")
def byte_tokenizer(embedded_folder: Path) -> Tokenizer:
    return Tokenizer.load(embedded_folder)


@pytest.fixture(scope="session")
def server_url(server: RunningServer) -> str:
    return server.base_url


@pytest.fixture(scope="session")
def pages(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the server whose pages the browser looks at: see tests/api/pages/page_server.py."""
    from tests.api.pages.page_server import serve_pages, write_words_model

    folder = tmp_path_factory.mktemp("pages")
    write_words_model(folder / "words", embedded_folder)
    with serve_pages(folder / "words", folder) as running:
        yield running.base_url


@pytest.fixture(scope="session")
def debugger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a browser's DevTools; tests with it are skipped where there is no Chromium."""
    pytest.importorskip("websockets.asyncio.client")
    from tests.api.pages.browser import BROWSER, start_browser

    if BROWSER is None:
        pytest.skip("no Chromium in the machine")
    with start_browser(tmp_path_factory.mktemp("browser")) as address:
        yield address


@pytest.fixture
async def page(debugger: str, pages: str) -> AsyncIterator[Page]:
    """The chat page, in a fresh profile with short answers."""
    from tests.api.pages.browser import chat_page

    async with chat_page(debugger, pages) as opened:
        yield opened
