"""Answers on the chat page while they come, and how they go on: live figures, Continue, and a model that still loads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.api.pages.browser import ENDED, ENDLESS, STORY, Page, ask, asked, begin, chat_page, load_again, send
from tests.api.pages.page_server import CONTEXT, KEY, serve_pages, write_words_model
from tests.conftest import RunningServer, engine_pid

pytestmark = pytest.mark.rest

CONTINUE = ".assistant .resume"


async def test_a_cut_answer_goes_on(page: Page, pages: str) -> None:
    first = await ask(page, STORY)
    assert (await page.texts(".figures span"))[0] == "cut at the token limit"
    await page.click(CONTINUE)
    await page.until("document.querySelector('.figures span:nth-child(2)')?.innerText === '24 tokens'")
    body = asked(page)[-1]
    assert body["continue_final_message"]
    assert [message["role"] for message in body["messages"]] == ["user", "assistant"]
    assert body["messages"][1]["content"].split() == first.split()
    # It is one answer, as if it had not been cut.
    assert await page.count("article") == 2
    whole = asked(page)[0] | {"stream": False, "stream_options": None, "max_tokens": 24}
    async with httpx.AsyncClient(trust_env=False, headers={"x-api-key": KEY}) as http:
        same = (await http.post(f"{pages}/v1/chat/completions", json=whole)).json()["choices"][0]["message"]["content"]
    assert (await page.text(".assistant .prose")).split() == same.split()
    # Kept as one, too; and what has been gone on from does not go on itself.
    await load_again(page)
    assert (await page.text(".assistant .prose")).split() == same.split()
    assert await page.visible(CONTINUE)
    await ask(page, "Thank you.", 2)
    assert not await page.visible(CONTINUE)
    assert [message["content"].split() for message in asked(page)[-1]["messages"]][1] == same.split()
    assert page.troubles == []


async def test_a_stopped_answer_goes_on_by_keyboard(page: Page) -> None:
    await begin(page)
    await page.press("Escape")
    await page.until(ENDED.format(1))
    before = await page.text(".assistant .prose")
    await page.set("[name=max_tokens]", "5")
    await page.value(f"document.querySelector('{CONTINUE}').focus()")
    await page.press("Enter")
    await page.until("document.querySelector('.figures .end')?.innerText === 'cut at the token limit'")
    # The button is gone; who pressed it goes on where the next message is written.
    assert await page.value("document.activeElement.id") == "text"
    after = await page.text(".assistant .prose")
    assert after.startswith(before.rstrip())
    assert len(after.split()) > len(before.split())
    # What is finished, or has thoughts only, does not go on.
    await page.click(".new-chat")
    await page.set("[name=reasoning_effort]", "low")
    await ask(page, "What is 2 + 2?")
    assert await page.count(CONTINUE) == 0
    assert page.troubles == []


async def test_tokens_per_second_while_it_runs_and_context_used(page: Page, pages: str) -> None:
    assert not await page.visible("#context")
    await page.set("[name=max_tokens]", ENDLESS)
    await send(page, STORY)
    await page.until("document.querySelectorAll('article[aria-busy=true] .figures span').length === 2")
    tokens, rate = await page.texts("article[aria-busy=true] .figures span")
    assert re.fullmatch(r"\d+ tokens", tokens)
    assert re.fullmatch(r"[\d.]+ tokens/s", rate)
    assert float(rate.split()[0]) > 0
    context = await page.text("#context")
    await page.until(f"document.getElementById('context').innerText !== {context!r}")
    assert await page.count("article[aria-busy=true] .actions") == 0
    await page.press("Escape")
    await page.until(ENDED.format(1))
    await page.set("[name=max_tokens]", "6")
    await ask(page, "And now?", 2)
    async with httpx.AsyncClient(trust_env=False, headers={"x-api-key": KEY}) as http:
        body = asked(page)[-1] | {"stream": False, "stream_options": None}
        usage = (await http.post(f"{pages}/v1/chat/completions", json=body)).json()["usage"]
    used = usage["prompt_tokens"] + usage["completion_tokens"]
    assert await page.text("#context") == f"{used:,} of {CONTEXT:,} tokens of context used"
    await page.click(".new-chat")
    assert not await page.visible("#context")
    assert page.troubles == []


@pytest.fixture
def loading(embedded_folder: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """A server for the pages that has just begun to load its model."""
    write_words_model(tmp_path / "words", embedded_folder)
    with serve_pages(tmp_path / "words", tmp_path, loading=True) as running:
        yield running


async def engine_of(server: RunningServer) -> int:
    while True:
        try:
            return engine_pid(server.process.pid)
        except (StopIteration, FileNotFoundError):
            await asyncio.sleep(0.05)


async def test_a_message_waits_for_the_model(debugger: str, loading: RunningServer) -> None:
    engine = await engine_of(loading)
    os.kill(engine, signal.SIGSTOP)
    try:
        async with chat_page(debugger, loading.base_url) as page:
            await send(page, "What is a lighthouse?")
            step = r"/The model is being loaded: \d\/6 [a-z ]+, \d+ s…/"
            await page.until(f"document.querySelector('.assistant .waits')?.innerText.match({step})")
            assert await page.value(f"document.getElementById('status').innerText.match({step}) !== null")
            assert await page.value("document.getElementById('send').getAttribute('aria-label')") == "Stop"
            seconds = await page.text(".assistant .waits")
            await page.until(f"document.querySelector('.assistant .waits').innerText !== {seconds!r}")
            # One that is stopped does not go; another one waits in its own conversation.
            await page.press("Escape")
            await page.until(ENDED.format(1))
            await page.click(".new-chat")
            await send(page, "And a ship?")
            await page.until("document.querySelector('.assistant .waits')?.innerText")
            os.kill(engine, signal.SIGCONT)
            await page.until("document.querySelector('.assistant .prose').innerText")
            await page.until(ENDED.format(1))
            assert not await page.visible(".assistant .waits")
            assert not await page.visible("#status")
            assert await page.text(".failure") == ""
            assert {message["messages"][0]["content"] for message in asked(page)[-1:]} == {"And a ship?"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)
