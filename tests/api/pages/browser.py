"""A headless Chromium driven through its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.api.pages.page_server import KEY

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_S = 60.0
SHORT = {"temperature": 0, "max_tokens": 12}
ENDLESS = "60000"
"""Tokens of an answer that somebody has to stop, however long a busy machine holds him up."""
ENDED = "document.querySelectorAll('article.assistant[aria-busy=false]').length === {}"
"""That so many answers have come to their ends."""
STORY = "Tell me a very long story about a lighthouse."
BEGUN = "document.querySelector('article.assistant .prose')?.innerText.length > 20"
STORED = """new Promise((done) => {
  const asked = indexedDB.open(`nf4-chat${new URL('.', location.href).pathname.slice(0, -1)}`);
  asked.onsuccess = () => {
    const all = asked.result.transaction('conversations').objectStore('conversations').getAll();
    all.onsuccess = () => { asked.result.close(); done(all.result.flatMap((one) => one.messages)
      .map((one) => [one.role, one.content, one.state ?? ''])); }; }; })"""


@contextlib.contextmanager
def start_browser(folder: Path) -> Iterator[str]:
    """Address of a browser's DevTools."""
    command = [
        str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--no-proxy-server", "--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            found = re.search(r"ws://([\d.:]+)/", line)
            if found:
                break
        yield f"http://{found[1]}"  # type: ignore[index]
    finally:
        process.terminate()
        process.wait(20)


class Page:
    """One tab. troubles: what went wrong in it: exceptions, and errors in its console."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self._answers: dict[str, Any] = {}
        self.troubles: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.neighbour: Callable[[str], contextlib.AbstractAsyncContextManager[Page]]
        """Opens an address in another tab of the same profile."""

    async def call(self, method: str, **params: Any) -> Any:
        """A DevTools command's result."""
        number = await self._send(method, params)
        while True:
            async with asyncio.timeout(PATIENCE_S):
                message = json.loads(await self._socket.recv())
            await self._note(message.get("method"), message.get("params", {}))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    async def _send(self, method: str, params: dict[str, Any]) -> int:
        self._number += 1
        await self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        return self._number

    async def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.troubles.append(json.dumps(params)[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.troubles.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"])
        elif method == "Fetch.requestPaused":
            await self._answer_paused(params)

    async def _answer_paused(self, params: dict[str, Any]) -> None:
        path = httpx.URL(params["request"]["url"]).path
        if path not in self._answers:
            await self._send("Fetch.continueRequest", {"requestId": params["requestId"]})
            return
        kind, body = self._answers[path]
        headers = [{"name": "Content-Type", "value": kind}]
        encoded = base64.b64encode(body.encode()).decode()
        answer = {
            "requestId": params["requestId"], "responseCode": 200, "responseHeaders": headers, "body": encoded,
        }  # fmt: skip
        await self._send("Fetch.fulfillRequest", answer)

    async def answer_for_server(self, path: str, kind: str, body: str) -> None:
        """From now on requests for path get this answer, as from a server with another model."""
        self._answers[path] = (kind, body)
        await self.call("Fetch.enable", patterns=[{"urlPattern": f"*{name}"} for name in self._answers])

    async def value(self, expression: str) -> Any:
        """Value of an expression (a promise's, too) in the page."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until an expression is true."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.value(f"!!({expression})"):  # noqa: ASYNC110 - what happens in a page tells nobody
                    await asyncio.sleep(0.05)
        except TimeoutError:
            shown = await self.value("document.body.innerText")
            raise AssertionError(f"never true: {expression}\nThe page shows:\n{shown}\n{self.troubles}") from None

    async def go(self, address: str) -> None:
        """Open an address and wait for its document; a new one, even where only the part behind # differs."""
        for url in ("about:blank", address):
            await self.call("Page.navigate", url=url)
            await self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    async def text(self, selector: str) -> str:
        """Text of the first element; "" where there is none."""
        return str(await self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    async def texts(self, selector: str) -> list[str]:
        """Text of all elements."""
        return list(
            await self.value(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText)")
        )

    async def count(self, selector: str) -> int:
        """Number of elements."""
        return int(await self.value(f"document.querySelectorAll({json.dumps(selector)}).length"))

    async def visible(self, selector: str) -> bool:
        """Whether the first element can be seen."""
        return bool(await self.value(f"document.querySelector({json.dumps(selector)}).checkVisibility()"))

    async def click(self, selector: str) -> None:
        """Click the first element."""
        await self.until(f"document.querySelector({json.dumps(selector)})")
        await self.value(f"document.querySelector({json.dumps(selector)}).click()")

    async def set(self, selector: str, value: str) -> None:
        """Fill a field as if it had been typed."""
        await self.value(
            f"(() => {{ const field = document.querySelector({json.dumps(selector)}); field.value = {json.dumps(value)};"
            "field.dispatchEvent(new Event('input', {bubbles: true}));"
            "field.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    async def press(self, key: str, text: str = "", modifiers: int = 0) -> None:
        """A key, as the browser gets it from a keyboard; modifiers: 1 Alt, 2 Control, 4 Command, 8 Shift."""
        codes = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40, "Tab": 9}
        code = codes.get(key, ord(key[0].upper()))
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        text = text or ("\r" if key == "Enter" else "")
        await self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def size(self, width: int, height: int, *, scale: float = 1, phone: bool = False) -> None:
        """Size of the window in CSS pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        await self.call("Emulation.setTouchEmulationEnabled", enabled=phone)

    async def scheme(self, name: str) -> None:
        """light or dark."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def screenshot(self, file: Path) -> None:
        """Write what is seen as PNG."""
        data = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(file.write_bytes, base64.b64decode(data["data"]))


@contextlib.asynccontextmanager
async def tab(debugger: str, address: str = "about:blank") -> AsyncIterator[Page]:
    """A tab of its own profile: nothing is kept of other tabs."""
    from websockets.asyncio.client import connect

    async with httpx.AsyncClient(trust_env=False) as http:
        version = (await http.get(f"{debugger}/json/version")).json()
    async with connect(version["webSocketDebuggerUrl"], max_size=None) as control:
        browser = Page(control)
        context = (await browser.call("Target.createBrowserContext"))["browserContextId"]
        try:
            async with _tab_of(debugger, browser, context, address) as page:
                page.neighbour = lambda other: _tab_of(debugger, browser, context, other)
                yield page
        finally:
            await browser.call("Target.disposeBrowserContext", browserContextId=context)


@contextlib.asynccontextmanager
async def _tab_of(debugger: str, browser: Page, context: str, address: str) -> AsyncIterator[Page]:
    from websockets.asyncio.client import connect

    made = await browser.call("Target.createTarget", url="about:blank", browserContextId=context)
    place = f"{debugger.replace('http', 'ws', 1)}/devtools/page/{made['targetId']}"
    async with connect(place, max_size=None) as socket:
        page = Page(socket)
        for domain in ("Runtime", "Log", "Page", "Network"):
            await page.call(f"{domain}.enable")
        await page.go(address)
        yield page


async def keep_settings(page: Page, values: dict[str, Any], path: str = "") -> None:
    """Set what new chats begin with, from the next load on; path: where the server is below its proxy's address."""
    await page.value(f"localStorage.setItem('nf4-chat{path}.settings', {json.dumps(json.dumps(values))})")


async def load(page: Page, address: str) -> None:
    """Open the chat page and wait for its models."""
    await page.go(address)
    await page.until("document.getElementById('model').value")


async def stored(page: Page) -> list[list[str]]:
    """Messages that the browser keeps: role, content, state."""
    return list(await page.value(STORED))


async def until_stored(page: Page, condition: Callable[[list[list[str]]], bool]) -> None:
    """Wait until a condition is true of what stored() gives."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition(await stored(page)):  # noqa: ASYNC110 - as in Page.until()
            await asyncio.sleep(0.05)


async def load_again(page: Page) -> None:
    """Load the page anew as soon as the browser has kept how its answers ended."""
    await until_stored(page, lambda messages: all(state != "running" for *_, state in messages))
    await load(page, await page.value("location.href"))


async def send(page: Page, text: str) -> None:
    """Write a message and send it with Enter."""
    await page.set("#text", text)
    await page.value("document.getElementById('text').focus()")
    await page.press("Enter")


async def begin(page: Page, text: str = STORY) -> None:
    """Send a message that has an endless answer, and wait for some of it."""
    await page.set("[name=max_tokens]", ENDLESS)
    await send(page, text)
    await page.until(BEGUN)


async def ask(page: Page, text: str, answers: int = 1) -> str:
    """Send a message and wait for its answer, the answers-th on the page; its text."""
    await send(page, text)
    await page.until(ENDED.format(answers))
    return (await page.texts("article.assistant .prose"))[-1]


async def answered(page: Page, text: str, **more: str) -> None:
    """Send a message and have this as its answer, in pieces of a few characters."""
    pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
    deltas = [{"content": piece} for piece in pieces]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in [more, *deltas]]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    await page.answer_for_server("/v1/chat/completions", "text/event-stream", stream)
    await ask(page, "Write something.")


async def choose_files(page: Page, *files: tuple[str, str, str | bytes], field: str = "files") -> None:
    """Choose files to attach, or for another field: (name, media type, content)."""
    made = ", ".join(
        f"new File([new Uint8Array({list(content.encode() if isinstance(content, str) else content)})],"
        f" {json.dumps(name)}, {{type: {json.dumps(kind)}}})"
        for name, kind, content in files
    )
    await page.value(
        f"(() => {{ const data = new DataTransfer(); [{made}].forEach((one) => data.items.add(one));"
        f"const files = document.getElementById('{field}'); files.files = data.files;"
        "files.dispatchEvent(new Event('change')); })()"
    )


async def paste(page: Page, text: str) -> None:
    """Paste a text into the field of messages, as from another program."""
    await page.value(
        f"(() => {{ const data = new DataTransfer(); data.setData('text/plain', {json.dumps(text)});"
        "const event = new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true});"
        "const field = document.getElementById('text'); field.focus();"
        "if (field.dispatchEvent(event)) document.execCommand('insertText', false, data.getData('text/plain')); })()"
    )


async def pasted(page: Page) -> str:
    """Paste the clipboard into the field of messages."""
    await page.set("#text", "")
    await page.value("document.getElementById('text').focus()")
    await page.call("Input.dispatchKeyEvent", type="keyDown", key="v", code="KeyV", modifiers=2, commands=["paste"])
    await page.call("Input.dispatchKeyEvent", type="keyUp", key="v", code="KeyV", modifiers=2)
    return str(await page.value("document.getElementById('text').value"))


def asked(page: Page) -> list[dict[str, Any]]:
    """The chat requests that the page has sent."""
    return [json.loads(one["postData"]) for one in page.requests if one["url"].endswith("/v1/chat/completions")]


@contextlib.asynccontextmanager
async def chat_page(debugger: str, pages: str) -> AsyncIterator[Page]:
    """The chat page in a fresh profile that has the key and asks for short answers."""
    async with tab(debugger, f"{pages}/docs") as page:
        await page.size(1200, 800)
        await keep_settings(page, SHORT)
        await page.value(f"localStorage.setItem('nf4-chat.key', {json.dumps(KEY)})")
        await load(page, f"{pages}/")
        yield page
