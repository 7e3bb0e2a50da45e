"""Take the pictures of the chat page in docs/: python -m tests.api.pages.screenshots. Needs Chromium and the embedded model.

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
WRITTEN = """Look at the **decimal digits** $d_k \\ldots d_1 d_0$ of the number $n$:

| divisor | rule | example |
| ---: | --- | --- |
| 3 | the digits' sum is divisible by 3 | 4 + 7 + 1 = 12, so 471 is |
| 4 | the last two digits are divisible by 4 | 1**16** is, 1**18** is not |
| 5 | the last digit is 0 or 5 | 13**5** is |

In code all three are `n % divisor == 0`."""


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
    """Write docs/page-light.png, page-dark.png and page-phone.png."""
    model = await asyncio.to_thread(resolve_checkpoint, EMBEDDED_MODEL, default_cache_dir(), lambda *_: None)
    with serve_pages(model, folder, compiled=True) as server, start_browser(folder / "profile") as debugger:
        async with chat_page(debugger, server.base_url) as page:
            await talk(page)
            for name, scheme, width, height, scale in (
                ("light", "light", 1200, 940, 1.4),
                ("dark", "dark", 1200, 940, 1.4),
                ("phone", "light", 390, 844, 2),
            ):
                await page.scheme(scheme)
                await page.size(width, height, scale=scale, phone=name == "phone")
                await page.value("document.activeElement.blur(); document.getElementById('toast').hidden = true")
                await page.value("document.getElementById('to-end').click()")
                await asyncio.sleep(0.5)  # what moves comes to rest
                await page.screenshot(DOCS / f"page-{name}.png")
                print(DOCS / f"page-{name}.png", file=sys.stderr)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        asyncio.run(main(Path(made)))
