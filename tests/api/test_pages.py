"""The pages in a headless Chromium, driven through its DevTools protocol; skipped where there is none."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

websockets = pytest.importorskip("websockets.asyncio.client")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium in the machine")


@pytest.fixture(scope="module")
def debugger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a browser's DevTools."""
    folder = tmp_path_factory.mktemp("browser")
    command = [
        str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--no-proxy-server", "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(r"ws://([\d.:]+)/", line)
        if found:
            break
    yield f"http://{found[1]}"  # type: ignore[index]
    process.terminate()
    process.wait(20)


class Page:
    """One tab."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self.troubles: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        await self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(await asyncio.wait_for(self._socket.recv(), 60))
            if message.get("method") == "Runtime.exceptionThrown":
                self.troubles.append(json.dumps(message["params"])[:500])
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.troubles.append(message["params"]["entry"]["text"])
            if message.get("id") == self._number:
                return message["result"]

    async def value(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 60) -> None:
        async with asyncio.timeout(timeout_s):
            while not await self.value(expression):  # noqa: ASYNC110 - what happens in a page tells nobody
                await asyncio.sleep(0.1)


async def open_page(debugger: str, address: str) -> tuple[Any, Page]:
    async with httpx.AsyncClient(trust_env=False) as http:
        target = (await http.put(f"{debugger}/json/new?about:blank")).json()
    socket = await websockets.connect(target["webSocketDebuggerUrl"], max_size=None)
    page = Page(socket)
    for domain in ("Runtime", "Log", "Page"):
        await page.call(f"{domain}.enable")
    await page.call("Page.navigate", url=address)
    await page.until("document.readyState === 'complete'")
    return socket, page


async def test_chat(debugger: str, server_url: str) -> None:
    socket, page = await open_page(debugger, f"{server_url}/")
    await page.until("document.getElementById('model').textContent.startsWith('smollm2')")
    for turn, question in enumerate(("What is the capital of France?", "<b>And</b> of Italy? Say one word."), 1):
        await page.value(
            f"document.getElementById('temperature').value = 0;"
            f"document.getElementById('text').value = {json.dumps(question)};"
            "document.getElementById('text').dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}))"
        )
        await page.until(f"document.querySelectorAll('.figures').length === {turn}")
    answers = await page.value("[...document.querySelectorAll('.assistant')].map((one) => one.textContent)")
    assert "Paris" in answers[0]
    assert len(answers) == 2
    figures = await page.value("document.querySelector('.figures').textContent")
    assert re.search(r"\d+ tokens, [\d.]+ tokens/s · first token after \d+ ms · NF4 dequantization [\d.]+ %", figures)
    # What people and models write stays text.
    assert await page.value("document.querySelectorAll('.turn b').length") == 0
    assert page.troubles == []
    await socket.close()


async def test_stop_and_new_chat(debugger: str, server_url: str) -> None:
    socket, page = await open_page(debugger, f"{server_url}/")
    await page.value("document.getElementById('text').value = 'Tell me a very long story.'; ask(); 0")
    await page.until("document.querySelector('.assistant').textContent.length > 20")
    await page.value("document.getElementById('send').click()")
    await page.until("document.getElementById('send').textContent === 'Send'")
    await page.value("document.getElementById('clear').click()")
    assert await page.value("document.getElementById('log').textContent") == ""
    assert page.troubles == []
    await socket.close()


async def test_api_page(debugger: str, server_url: str) -> None:
    socket, page = await open_page(debugger, f"{server_url}/docs")
    await page.until("document.querySelectorAll('#endpoints details').length > 8")
    await page.value(
        "[...document.querySelectorAll('#endpoints details')].find((one) => "
        "one.textContent.includes('/version')).querySelector('button').click()"
    )
    await page.until("[...document.querySelectorAll('pre')].some((one) => one.textContent.includes('\"version\"'))")
    assert page.troubles == []
    await socket.close()
