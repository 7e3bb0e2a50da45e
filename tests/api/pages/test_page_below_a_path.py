"""The chat page behind a reverse proxy that has the server below a path."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.api.pages.browser import SHORT, ask, keep_settings, load_again, tab
from tests.api.pages.page_server import KEY

pytestmark = pytest.mark.rest


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.fixture
async def proxy(pages: str) -> AsyncIterator[str]:
    """Address of a proxy that has the server at /one/ and at /two/, and nothing else."""
    server = httpx.URL(pages)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, rest = head.split(b" ", 2)
        first, _, path = target.removeprefix(b"/").partition(b"/")
        if first not in (b"one", b"two"):
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()
            return
        above, below = await asyncio.open_connection(server.host, server.port)
        # One request for a connection: what follows in one would have to be rewritten, too.
        lines = [line for line in rest.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        lines.insert(1, b"Connection: close")
        below.write(b" ".join((method, b"/" + path, b"\r\n".join(lines))))
        await asyncio.gather(_copy(reader, below), _copy(above, writer))

    async with await asyncio.start_server(forward, "127.0.0.1", 0) as listening:
        host, port = listening.sockets[0].getsockname()
        yield f"http://{host}:{port}"


async def test_all_of_the_page_works_below_a_path(debugger: str, proxy: str) -> None:
    async with tab(debugger, f"{proxy}/one/docs") as page:
        await page.until("document.querySelectorAll('#endpoints details').length > 8")
        await keep_settings(page, SHORT, "/one")
        await page.go(f"{proxy}/one/")
        await page.until("document.getElementById('status').innerText.includes('wants an API key')")
        await page.set("#key", KEY)
        await page.until("document.getElementById('model').value")
        answer = await ask(page, "What is a lighthouse?")
        assert answer
        await load_again(page)
        assert await page.text(".assistant .prose") == answer
        await page.click(".new-chat")
        assert await page.value("location.pathname") == "/one/"
        addresses = {httpx.URL(request["url"]).path for request in page.requests}
        assert [path for path in addresses if path != "blank" and not path.startswith("/one/")] == []
        # Another server below the same address sees neither the key nor the conversations.
        await page.go(f"{proxy}/two/")
        await page.until("document.getElementById('status').innerText.includes('wants an API key')")
        assert await page.count(".item") == 0
        assert [one for one in page.troubles if "401" not in one] == []
