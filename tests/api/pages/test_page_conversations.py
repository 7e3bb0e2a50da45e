"""Conversations of the chat page: kept, found, renamed, deleted, exported and taken in again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.api.pages.browser import ENDED, ENDLESS, Page, ask, begin, choose_files, load, load_again, send, until_stored

pytestmark = pytest.mark.rest

TITLES = "[...document.querySelectorAll('.item .title')].map((one) => one.innerText)"


@pytest.fixture
async def three(page: Page) -> Page:
    """The page with three conversations, the last one open."""
    await page.set("[name=max_tokens]", "2")
    for question in ("What is a lighthouse?", "Name a colour.", "Is 7 a prime?"):
        await page.click(".new-chat")
        await ask(page, question)
    return page


async def choose(page: Page, title: str, action: str) -> None:
    """Choose from the menu of a conversation."""
    await page.value(f"document.querySelector('[aria-label=\"Menu of {title}\"]').click()")
    assert await page.visible("#menu")
    await page.click(f"#menu [data-action={action}]")


async def saved(folder: Path, suffix: str) -> str:
    """Text of the file that the browser saves; the file is gone then."""

    def found() -> str | None:
        for file in folder.glob(f"*{suffix}"):
            text = file.read_text()
            file.unlink()
            return text
        return None

    async with asyncio.timeout(60):
        while not (text := found()):  # noqa: ASYNC110 - the file system tells nobody
            await asyncio.sleep(0.05)
    return text


async def test_kept_listed_and_opened(three: Page, pages: str) -> None:
    page = three
    assert await page.value(TITLES) == ["Is 7 a prime?", "Name a colour.", "What is a lighthouse?"]
    answer = await page.text(".assistant .prose")
    await load_again(page)
    assert await page.value(TITLES) == ["Is 7 a prime?", "Name a colour.", "What is a lighthouse?"]
    # The address names the conversation that is open; it and its figures are as they were.
    assert await page.text(".user .text") == "Is 7 a prime?"
    assert await page.text(".assistant .prose") == answer
    assert (await page.texts(".figures span"))[1] == "2 tokens"
    await page.click(".item:last-child a")
    await page.until("document.querySelector('.user .text').innerText === 'What is a lighthouse?'")
    await page.value("history.back()")
    await page.until("document.querySelector('.user .text').innerText === 'Is 7 a prime?'")
    await load(page, f"{pages}/")
    assert await page.count("article") == 0
    assert page.troubles == []


async def test_search(three: Page) -> None:
    await three.set("#search", "COLOUR")
    assert await three.value(TITLES) == ["Name a colour."]
    await choose(three, "Name a colour.", "rename")
    await three.set("#rename input", "Paint")
    await three.click("#rename .main")
    # By its title no more, but by what was said in it.
    await three.until("document.querySelector('.item .title').innerText === 'Paint'")
    assert "Name a colour." in await three.text(".item .found")
    await three.set("#search", "nowhere to be found")
    assert await three.text("#conversations") == "Nothing found."
    await three.set("#search", "")
    assert sorted(await three.value(TITLES)) == ["Is 7 a prime?", "Paint", "What is a lighthouse?"]


async def test_titles_have_no_markdown(page: Page) -> None:
    await page.set("[name=max_tokens]", "2")
    for question in (
        "# **List** `two` [ports](http://x)\nof Lisbon", "```python\nx = __init__\n```", "What is 2*3*4?",
        "<b onclick=x>*Who*</b>",
    ):  # fmt: skip
        await page.click(".new-chat")
        await ask(page, question)
    titles = ["<b onclick=x>Who</b>", "What is 2*3*4?", "x = __init__", "List two ports"]
    assert await page.value(TITLES) == titles
    assert await page.text("#title") == titles[0]
    assert await page.value("document.title") == f"{titles[0]} · NF4 server"
    assert page.troubles == []


async def test_rename_and_delete(three: Page, pages: str) -> None:
    page = three
    await choose(page, "Is 7 a prime?", "rename")
    await page.set("#rename input", "Of <i>primes</i>")
    await page.click("#rename .main")
    await page.until("document.getElementById('title').innerText === 'Of <i>primes</i>'")
    await choose(page, "Name a colour.", "delete")
    await page.until("document.getElementById('toast').innerText.includes('is deleted')")
    assert await page.value(TITLES) == ["Of <i>primes</i>", "What is a lighthouse?"]
    await page.click("#toast button")
    await page.until("document.querySelectorAll('.item').length === 3")
    assert await page.text(".user .text") == "Name a colour."
    await choose(page, "Name a colour.", "delete")
    await page.until("document.querySelectorAll('.item').length === 2")
    assert await page.count("article") == 0
    await load(page, f"{pages}/")
    assert await page.value(TITLES) == ["Of <i>primes</i>", "What is a lighthouse?"]


async def test_an_answer_that_was_left(page: Page) -> None:
    await page.set("[name=max_tokens]", ENDLESS)
    await send(page, "Tell me a very long story.")
    await until_stored(page, lambda kept: any(role == "assistant" and len(text) > 20 for role, text, _ in kept))
    await load(page, await page.value("location.href"))
    assert await page.text(".user .text") == "Tell me a very long story."
    await page.until(ENDED.format(1))
    assert (await page.texts(".figures span"))[0] == "interrupted"
    assert len(await page.text(".assistant .prose")) > 20
    # Deleted while its answer comes, a conversation stays deleted.
    await page.click(".new-chat")
    await begin(page, "Another long story.")
    await choose(page, "Another long story.", "delete")
    await page.until("document.querySelectorAll('.item').length === 1")
    await asyncio.sleep(1.5)
    await load(page, await page.value("location.href"))
    assert await page.value(TITLES) == ["Tell me a very long story."]


async def test_export_and_import(three: Page, pages: str, tmp_path: Path) -> None:
    page = three
    await page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    answer = await page.text(".assistant .prose")
    await choose(page, "Is 7 a prime?", "markdown")
    markdown = await saved(tmp_path, ".md")
    assert markdown.startswith("# Is 7 a prime?\n")
    assert "\n## You\n\nIs 7 a prime?\n\n## smollm2-135m-instruct\n" in markdown
    assert answer in markdown
    await choose(page, "Is 7 a prime?", "json")
    one = json.loads(await saved(tmp_path, ".json"))
    assert [message["content"].strip() for message in one["conversations"][0]["messages"]] == ["Is 7 a prime?", answer]
    await page.click("#export-all")
    everything = await saved(tmp_path, ".json")
    assert len(json.loads(everything)["conversations"]) == 3
    # Another person's browser takes it in, and goes on with it.
    await page.value("indexedDB.databases && new Promise((done) => { const asked = indexedDB.deleteDatabase('nf4-chat');"
                     "asked.onblocked = asked.onsuccess = () => done(); })")  # fmt: skip
    await load(page, f"{pages}/")
    await page.until("document.querySelectorAll('.item').length === 0")
    await choose_files(page, ("a.json", "", everything), field="import-file")
    await page.until("document.querySelectorAll('.item').length === 3")
    await page.value("[...document.querySelectorAll('.item a')].find((one) => one.title.includes('prime')).click()")
    await page.until("document.querySelector('.assistant .prose')")
    assert await page.text(".assistant .prose") == answer
    await ask(page, "And 8?", 2)
    await choose_files(page, ("a.json", "", '{"conversations": []}'), field="import-file")
    await page.until("document.getElementById('toast').innerText.includes('no export')")
    # Messages that stand behind one another in a circle have no beginning to be shown from.
    circle = [{"id": one, "parent": other, "role": "user", "content": ""} for one, other in ("ab", "ba")]
    await choose_files(
        page,
        ("a.json", "", json.dumps({"format": "nf4-chat", "conversations": [{"messages": circle}]})),
        field="import-file",
    )
    await page.until("document.getElementById('toast').innerText.includes('belongs nowhere')")
    assert page.troubles == []
