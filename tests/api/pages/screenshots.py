"""Take the picture of the chat page in docs/: python -m tests.api.pages.screenshots. Needs Chromium and the embedded model.

The first answer and its figures are the model's own, so that they are to be taken on a machine that does nothing else; the
second one is edited on the page, and says so.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from server.checkpoint.source import resolve_checkpoint
from server.config import EMBEDDED_MODEL, default_cache_dir
from tests.api.pages.browser import ENDED, Page, ask, chat_page, start_browser
from tests.api.pages.page_server import serve_pages

DOCS = Path(__file__).parents[3] / "docs"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CODE = "Write a short Python function that checks whether a number is even, with a docstring."
TABLE = "And how do I tell whether it is divisible by 3, 4 or 5?"
WRITTEN = """Write it as $n = \\sum_{i=0}^{k} d_i \\, 10^i$, with **decimal digits** $d_i$:

| divisor | rule | example |
| ---: | --- | --- |
| 3 | $\\sum_i d_i$ is divisible by 3 | 4 + 7 + 1 = 12, so 471 is |
| 4 | $10 \\, d_1 + d_0$ is divisible by 4 | 1**16** is, 1**18** is not |
| 5 | $d_0$ is 0 or 5 | 13**5** is |"""


async def talk(page: Page) -> None:
    """A conversation to look at, and two more in the list."""
    for question in ("Name a colour.", "What is a lighthouse?"):
        await page.set("[name=max_tokens]", "4")
        await page.click(".new-chat")
        await ask(page, question)
    await page.click(".new-chat")
    await page.set("[name=system]", SYSTEM)
    await page.set("[name=max_tokens]", "80")
    await page.set("[name=stop]", "\\n\\ndef")
    await ask(page, CODE)
    await page.set("[name=max_tokens]", "8")
    await ask(page, TABLE, 2)
    await page.click("article.assistant:last-child [aria-label=Edit]")
    await page.set("article.assistant textarea", WRITTEN)
    await page.click(".edit [type=submit]")
    await page.until(ENDED.format(2))


async def main(folder: Path) -> None:
    """Write docs/chat-page.png."""
    model = await asyncio.to_thread(resolve_checkpoint, EMBEDDED_MODEL, default_cache_dir(), lambda *_: None)
    with serve_pages(model, folder, compiled=True) as server, start_browser(folder / "profile") as debugger:
        async with chat_page(debugger, server.base_url) as page:
            await talk(page)
            await page.size(1060, 890, scale=1.25)
            await page.value("document.activeElement.blur(); document.getElementById('toast').hidden = true")
            await page.value("document.getElementById('to-end').click()")
            await asyncio.sleep(0.5)  # what moves comes to rest
            await page.screenshot(DOCS / "chat-page.png")
            print(DOCS / "chat-page.png", file=sys.stderr)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        asyncio.run(main(Path(made)))
