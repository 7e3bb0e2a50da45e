"""Two tabs of the chat page on one conversation: neither loses what the other does."""

from __future__ import annotations

import pytest

from tests.api.pages.browser import BEGUN, ENDED, ENDLESS, STORY, Page, ask, asked, begin, load_again, send, stored

pytestmark = pytest.mark.rest


async def test_an_answer_is_seen_and_stopped_from_the_other_tab(page: Page) -> None:
    await begin(page)
    async with page.neighbour(await page.value("location.href")) as other:
        # It comes here, too, and is no answer that was left.
        await other.until(BEGUN)
        await other.until("document.querySelector('article.assistant').ariaBusy === 'true'")
        length = len(await other.text(".assistant .prose"))
        await other.until(f"document.querySelector('.assistant .prose').innerText.length > {length}")
        # Nothing is put behind an answer that is not there yet.
        await send(other, "And then?")
        assert await other.count("article") == 2
        assert asked(other) == []
        await other.press("Escape")
        await page.until(ENDED.format(1))
        assert (await page.texts(".figures span"))[0] == "stopped"
        await other.until("document.querySelector('.figures .end')?.innerText === 'stopped'")
        whole = await page.text(".assistant .prose")
        await other.until(f"document.querySelector('.assistant .prose').innerText === {whole!r}")
        # It goes on in the other tab, and both have one answer.
        await other.set("[name=max_tokens]", "8")
        await other.click(".resume")
        await page.until("document.querySelector('.figures .end')?.innerText === 'cut at the token limit'")
        await page.until(f"document.querySelector('.assistant .prose').innerText.length > {len(whole)}")
        assert await page.text(".assistant .prose") == await other.text(".assistant .prose")
        assert [role for role, *_ in await stored(page)] == ["user", "assistant"]
        assert page.troubles == other.troubles == []


async def test_both_write_at_once(page: Page) -> None:
    await ask(page, "Is 7 a prime?")
    async with page.neighbour(await page.value("location.href")) as other:
        await other.until("document.querySelector('.assistant .prose')")
        # A message that is half edited stays, whatever happens elsewhere.
        await other.click("article.user [aria-label=Edit]")
        await other.set("article.user textarea", "Is 9 a prime?")
        await page.set("[name=max_tokens]", "400")
        await send(page, "And 8?")
        await page.until(
            "document.querySelectorAll('article.assistant')[1]?.querySelector('.prose').innerText.length > 20"
        )
        assert await other.value("document.querySelector('article.user textarea').value") == "Is 9 a prime?"
        await other.set("[name=max_tokens]", "6")
        await other.click(".edit [type=submit]")
        await other.until("document.querySelector('.user .count')?.innerText === '2/2'")
        await other.until(ENDED.format(1))
        await page.until(ENDED.format(2))
        # Each has gone on in its own branch, and has the other one's.
        assert await page.texts("article.user .text") == ["Is 7 a prime?", "And 8?"]
        assert await other.texts("article.user .text") == ["Is 9 a prime?"]
        await page.until("document.querySelector('.user .count')?.innerText === '1/2'")
        await load_again(page)
        kept = await stored(page)
        assert sorted(content for role, content, _ in kept if role == "user") == [
            "And 8?",
            "Is 7 a prime?",
            "Is 9 a prime?",
        ]
        assert [state for role, _, state in kept if role == "assistant"] == ["done"] * 3
        await load_again(other)
        await other.click(".user [aria-label='Earlier version']")
        await other.until("document.querySelectorAll('article').length === 4")
        assert await other.texts("article.user .text") == ["Is 7 a prime?", "And 8?"]
        assert page.troubles == other.troubles == []


async def test_a_name_and_settings_of_one_stay_while_the_other_answers(page: Page) -> None:
    await begin(page)
    async with page.neighbour(await page.value("location.href")) as other:
        await other.until(BEGUN)
        await other.click("#chat-menu")
        await other.click("#menu [data-action=rename]")
        await other.set("#rename input", "Of the sea")
        await other.click("#rename .main")
        await other.set("[name=system]", "You are terse.")
        await page.until("document.getElementById('title').innerText === 'Of the sea'")
        await page.until("document.querySelector('[name=system]').value === 'You are terse.'")
        await page.press("Escape")
        await page.until(ENDED.format(1))
        # Deleted in one, it does not come back from the other, where an answer comes.
        await page.click(".resume")
        await page.until("document.querySelector('article.assistant').ariaBusy === 'true'")
        await other.click("#chat-menu")
        await other.click("#menu [data-action=delete]")
        await page.until("document.querySelectorAll('article').length === 0")
        await page.until("document.querySelectorAll('.item').length === 0")
        assert await stored(page) == []
        await other.click("#toast button")
        await page.until("document.querySelectorAll('.item').length === 1")
        assert [role for role, *_ in await stored(page)] == ["user", "assistant"]


async def test_a_tab_that_goes_leaves_its_answer(page: Page) -> None:
    await page.click(".new-chat")
    await ask(page, "Is 7 a prime?")
    async with page.neighbour(await page.value("location.href")) as other:
        # The conversation's settings come with it.
        await other.until("document.querySelector('.assistant .prose')")
        await other.set("[name=max_tokens]", ENDLESS)
        await send(other, STORY)
        await page.until("document.querySelectorAll('article').length === 4")
        await page.until("document.getElementById('send').ariaLabel === 'Stop'")
        await other.go("about:blank")
        await page.until("document.getElementById('send').ariaLabel === 'Send'")
        assert (await page.texts(".figures .end"))[-1] == "interrupted"
        await page.set("[name=max_tokens]", "4")
        await page.click("article:last-child [aria-label=Regenerate]")
        await page.until(
            "[...document.querySelectorAll('.figures .end')].at(-1)?.innerText === 'cut at the token limit'"
        )
        assert len(await stored(page)) == 5
    assert page.troubles == []
