"""Text files and long pastes that go with a message on the chat page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.api.pages.browser import Page, ask, asked, choose_files, load_again, paste
from tests.api.pages.test_page_conversations import choose, saved

pytestmark = pytest.mark.rest

CODE = "def f():\n    return '```'\n"
LONG = "A long line of a long text, <b>with a mark</b>.\n" * 80
NAMES = "[...document.querySelectorAll('#attached .name')].map((one) => one.innerText)"
FIELD = "document.getElementById('text').value"
SHORT = "A short one."


async def test_text_files_are_part_of_the_message(page: Page) -> None:
    await choose_files(
        page, ("a.py", "text/x-python", CODE), ("<i>b</i>.csv", "", b"\xff\xfe" + "ä;1\n".encode("utf-16le"))
    )
    await page.until(f"{NAMES}.length === 2")
    assert await page.value(NAMES) == ["a.py", "<i>b</i>.csv"]
    assert await page.text("#attached small") == "2 lines, 26 characters"
    await ask(page, "What is this?")
    assert await page.count("#attached .file") == 0
    content = asked(page)[-1]["messages"][0]["content"]
    assert content == f"a.py:\n````\n{CODE}````\n\n<i>b</i>.csv:\n```\nä;1\n```\n\nWhat is this?"
    # They are shown folded, as text, and are kept.
    await load_again(page)
    assert await page.texts("article.user .file .name") == ["a.py", "<i>b</i>.csv"]
    assert not await page.visible("article.user .file pre")
    await page.click("article.user .file summary")
    assert await page.value("document.querySelector('article.user .file pre').textContent") == CODE
    assert await page.count("article.user i") == 0
    # What is edited keeps them, and they are sent again.
    await page.click("article.user [aria-label=Edit]")
    await page.set("article.user textarea", "Who wrote this?")
    await page.press("Enter")
    await page.until("document.querySelector('.user .count')?.innerText === '2/2'")
    await page.until("document.querySelector('.figures .end')")
    assert asked(page)[-1]["messages"][0]["content"] == content.replace("What is", "Who wrote")
    assert page.troubles == []


async def test_a_file_alone_is_a_message(page: Page, tmp_path: Path) -> None:
    await choose_files(page, ("notes.txt", "text/plain", "# Notes"))
    await page.until(f"{NAMES}.length === 1")
    await page.value("document.getElementById('text').focus()")
    await page.press("Enter")
    await page.until("document.querySelector('.figures .end')")
    assert await page.text("#title") == "notes.txt"
    assert asked(page)[-1]["messages"] == [{"role": "user", "content": "notes.txt:\n```\n# Notes\n```"}]
    assert await page.count("article.user .text") == 0
    await page.set("#search", "notes")
    assert await page.count(".item") == 1
    await page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    await choose(page, "notes.txt", "markdown")
    assert "## You\n\nnotes.txt:\n```\n# Notes\n```\n" in await saved(tmp_path, ".md")


async def test_a_long_paste_is_attached(page: Page) -> None:
    await paste(page, SHORT)
    assert await page.value(FIELD) == SHORT
    await paste(page, LONG)
    assert await page.value(FIELD) == SHORT
    assert await page.value(NAMES) == ["Pasted text"]
    # It may be put into the message after all, or be taken away.
    await page.click("[aria-label='Put into the message']")
    assert await page.value(FIELD) == SHORT + LONG
    assert await page.value(NAMES) == []
    await page.set("#text", "")
    await paste(page, LONG)
    await paste(page, LONG.upper())
    assert await page.value(NAMES) == ["Pasted text", "Pasted text 2"]
    await page.click("[aria-label='Remove Pasted text']")
    assert await page.value(NAMES) == ["Pasted text 2"]
    assert await page.value("document.activeElement.id") == "text"
    # A draft keeps what is attached to it.
    await ask(page, "Say it in short.")
    assert LONG.upper().rstrip() in asked(page)[-1]["messages"][0]["content"]
    await paste(page, LONG)
    await page.click(".new-chat")
    assert await page.value(NAMES) == []
    await page.value("history.back()")
    await page.until(f"{NAMES}.length === 1")
    assert "Pasted text is attached." in await page.value("document.getElementById('announcer').textContent")
    assert page.troubles == []


async def test_what_is_no_text_is_refused_in_words(page: Page) -> None:
    for name, kind, content, said in (
        ("a.pdf", "application/pdf", "%PDF-1.7", "PDF files are not read here"),
        ("a.zip", "application/zip", b"PK\x03\x04\x00\xff", "it is no text file"),
        ("zeros.txt", "text/plain", b"a\x00b", "it is no text file"),
        ("dot.png", "image/png", b"\x89PNG", "this model takes no images"),
    ):
        await choose_files(page, (name, kind, content))
        await page.until(f"document.getElementById('toast').innerText.includes({json.dumps(said)})")
        assert name in await page.text("#toast")
    await page.value(
        "(() => { const data = new DataTransfer(); data.items.add(new File(['a'.repeat((1 << 20) + 1)], 'big.txt'));"
        "document.dispatchEvent(new DragEvent('drop', {dataTransfer: data, cancelable: true})); })()"
    )
    await page.until("document.getElementById('toast').innerText === 'big.txt is larger than 1 MiB.'")
    assert await page.value(NAMES) == []
    assert page.troubles == []
