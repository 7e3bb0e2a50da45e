"""The chat page and the API's in Chromium, against a server with a small model that says plain words."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from tests.api.conftest import MODEL
from tests.api.pages.browser import ENDED, ENDLESS, STORY, Page, ask, asked, begin, keep_settings, load, send, tab
from tests.api.pages.page_server import ADAPTER, CONTEXT, KEY

pytestmark = pytest.mark.rest


async def test_answer_and_its_figures(page: Page, pages: str) -> None:
    answer = await ask(page, "What is the capital of France?")
    whole = asked(page)[0] | {"stream": False, "stream_options": None}
    async with httpx.AsyncClient(trust_env=False, headers={"x-api-key": KEY}) as http:
        same = (await http.post(f"{pages}/v1/chat/completions", json=whole)).json()["choices"][0]["message"]["content"]
    assert answer.split() == same.split() != []
    figures = await page.texts(".figures span")
    assert figures[0] == "cut at the token limit"
    assert figures[1] == "12 tokens"
    assert re.fullmatch(r"[\d.]+ tokens/s", figures[2])
    assert re.fullmatch(r"first token [\d.]+ m?s", figures[3])
    assert re.fullmatch(r"NF4 dequantization [\d.]+ m?s \([\d.]+ %\)", figures[4])
    await ask(page, "<b>And</b> of Italy?", 2)
    assert [message["role"] for message in asked(page)[1]["messages"]] == ["user", "assistant", "user"]
    # What people write stays text.
    assert (await page.texts("article.user .text"))[1] == "<b>And</b> of Italy?"
    assert await page.text("#text") == ""
    assert page.troubles == []


async def test_key_is_asked_for_and_kept(debugger: str, pages: str) -> None:
    async with tab(debugger, f"{pages}/") as page:
        await page.until("document.getElementById('status').innerText.includes('wants an API key')")
        await page.click("#enter-key")
        assert await page.value("document.activeElement.id") == "key"
        await page.set("#key", "wrong")
        await page.until("document.getElementById('status').innerText.includes('not known')")
        await page.set("#key", KEY)
        await page.until("document.getElementById('status').hidden")
        await load(page, f"{pages}/")
        assert await page.value("document.getElementById('model').value") == MODEL
        assert not await page.visible("#status")


async def test_settings_are_sent_as_they_are_set(page: Page, pages: str) -> None:
    await keep_settings(page, {})
    await load(page, f"{pages}/")
    await page.set("[name=max_tokens]", "2")
    await ask(page, "Hi")
    assert asked(page)[-1].keys() == {"model", "messages", "stream", "timings", "stream_options", "max_tokens"}
    values = {"temperature": 0, "top_p": 0.9, "seed": 7, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
    for name, value in values.items():
        await page.set(f"[name={name}]", str(value))
    await page.set("[name=stop]", "END\n\\nSTOP")
    await page.set("[name=system]", "You are terse.")
    await ask(page, "And now?", 2)
    body = asked(page)[-1]
    assert body.items() >= (values | {"max_tokens": 2, "stop": ["END", "\nSTOP"]}).items()
    assert body["messages"][0] == {"role": "system", "content": "You are terse."}
    # Emptied again, a field is not sent, least of all as 0.
    await page.set("[name=temperature]", "")
    await ask(page, "Once more.", 3)
    assert "temperature" not in asked(page)[-1]
    # They are kept; and what is out of range is shown, not sent.
    await load(page, f"{pages}/")
    assert await page.value("document.querySelector('[name=seed]').value") == "7"
    await page.set("[name=temperature]", "9")
    await send(page, "Is this sent?")
    assert await page.visible("#settings")
    assert await page.value("document.getElementById('text').value") == "Is this sent?"
    assert len(asked(page)) == 3
    assert page.troubles == []


async def test_model_and_adapter_are_chosen(page: Page) -> None:
    assert await page.value("[...document.querySelectorAll('#model option')].map((one) => one.value)") == [
        MODEL,
        ADAPTER,
    ]
    await page.set("#model", ADAPTER)
    assert MODEL in await page.text("#welcome-about")
    await ask(page, "Hi")
    assert asked(page)[-1]["model"] == ADAPTER
    await page.set("#model", MODEL)
    await ask(page, "Hi again", 2)
    assert asked(page)[-1]["model"] == MODEL


async def test_thoughts_are_folded(page: Page) -> None:
    await page.set("[name=reasoning_effort]", "low")
    await ask(page, "What is 2 + 2?")
    assert re.fullmatch(r"Thought for [\d.]+ s", await page.text(".thoughts summary"))
    assert not await page.value("document.querySelector('.thoughts').open")
    assert not await page.visible(".thoughts .text")
    await page.click(".thoughts summary")
    assert await page.text(".thoughts .text")
    # Thoughts alone are no answer to go on from.
    await page.set("[name=reasoning_effort]", "")
    await ask(page, "And 3 + 3?", 2)
    assert [message["content"] for message in asked(page)[-1]["messages"]] == ["And 3 + 3?"]


async def test_escape_stops_and_what_came_stays(page: Page) -> None:
    await begin(page)
    assert await page.value("document.getElementById('send').getAttribute('aria-label')") == "Stop"
    # A second message waits in its field until the answer has ended.
    await send(page, "Not yet")
    assert len(asked(page)) == 1
    await page.press("Escape")
    await page.until(ENDED.format(1))
    assert (await page.texts(".figures span"))[0] == "stopped"
    assert len(await page.text(".assistant .prose")) > 20
    assert await page.value("document.getElementById('send').getAttribute('aria-label')") == "Send"
    assert await page.value("document.getElementById('text').value") == "Not yet"


async def test_new_chat_during_an_answer(page: Page) -> None:
    await page.set("[name=max_tokens]", "150")
    await send(page, STORY)
    await page.until("document.querySelector('.assistant .prose')?.innerText.length > 5")
    await page.click(".new-chat")
    assert await page.count("article") == 0
    await page.set("[name=max_tokens]", "4")
    await ask(page, "Say hi.")
    assert [message["content"] for message in asked(page)[1]["messages"]] == ["Say hi."]
    assert await page.texts("article.user .text") == ["Say hi."]
    # The first answer has gone on in its own conversation.
    await page.until("!document.querySelector('.item.running')")
    assert await page.count("article") == 2
    await page.value("[...document.querySelectorAll('.item a')].find((one) => one.title.includes('story')).click()")
    await page.until("document.getElementById('title').innerText.includes('story')")
    assert await page.texts("article.user .text") == [STORY]
    assert (await page.texts(".figures span"))[1] == "150 tokens"
    assert page.troubles == []


async def test_scrolling_up_while_it_streams(page: Page) -> None:
    await page.size(1000, 320)
    await page.set("[name=max_tokens]", ENDLESS)
    await send(page, STORY + "\nIt has many rooms." * 15)
    log = "document.getElementById('log')"
    await page.until(f"{log}.scrollHeight > {log}.clientHeight + 150")
    # It follows the end, until somebody goes up.
    assert await page.value(f"{log}.scrollHeight - {log}.clientHeight - {log}.scrollTop < 32")
    # What tells of its own scrolling to the end may come behind the wheel.
    await page.value(f"['wheel', 'scroll'].map((name) => {log}.dispatchEvent(new WheelEvent(name, {{deltaY: -1}})))")
    place = await page.value(f"{log}.scrollTop")
    await page.until(f"{log}.scrollHeight - {log}.clientHeight > {place} + 50")
    assert await page.value(f"{log}.scrollTop") <= place
    await page.call("Input.dispatchMouseEvent", type="mouseWheel", x=500, y=120, deltaX=0, deltaY=-100_000)
    await page.until(f"{log}.scrollTop === 0")
    height = await page.value(f"{log}.scrollHeight")
    await page.until(f"{log}.scrollHeight > {height}")
    assert await page.value(f"{log}.scrollTop") == 0
    assert await page.visible("#to-end")
    await page.click("#to-end")
    height = await page.value(f"{log}.scrollHeight")
    await page.until(f"{log}.scrollHeight > {height}")
    assert await page.value(f"{log}.scrollHeight - {log}.clientHeight - {log}.scrollTop < 32")
    await page.press("Escape")
    await page.until(ENDED.format(1))


async def test_edit_regenerate_and_versions(page: Page) -> None:
    first = await ask(page, "What is the capital of France?")
    await page.click(".assistant [aria-label=Regenerate]")
    await page.until("document.querySelector('.assistant .count')?.innerText === '2/2'")
    await page.until(ENDED.format(1))
    assert await page.count("article") == 2
    assert [message["role"] for message in asked(page)[-1]["messages"]] == ["user"]
    await page.click("[aria-label='Earlier version']")
    assert await page.text(".assistant .count") == "1/2"
    assert await page.text(".assistant .prose") == first
    # The arrow up takes the last message back to be changed.
    await page.value("document.getElementById('text').focus()")
    await page.press("ArrowUp")
    await page.set("article.user textarea", "What is the capital of Italy?")
    await page.press("Enter")
    await page.until("document.querySelector('.user .count')?.innerText === '2/2'")
    await page.until(ENDED.format(1))
    assert asked(page)[-1]["messages"] == [{"role": "user", "content": "What is the capital of Italy?"}]
    assert await page.text(".assistant .prose")
    await page.click(".user [aria-label='Earlier version']")
    assert await page.text(".user .text") == "What is the capital of France?"
    # An answer that somebody has changed is what the model goes on from.
    await page.click(".assistant [aria-label=Edit]")
    await page.set("article.assistant textarea", "It is **Lyon**.")
    await page.click(".edit [type=submit]")
    assert await page.text(".assistant strong") == "Lyon"
    await ask(page, "Sure?", 2)
    assert asked(page)[-1]["messages"][1]["content"] == "It is **Lyon**."
    assert page.troubles == []


async def test_enter_sends_what_is_edited(page: Page) -> None:
    await ask(page, "One")
    field = "document.querySelector('.edit textarea')"
    await page.click("article.user [aria-label=Edit]")
    await page.press("Enter", modifiers=8)
    await page.press("a", "a")
    assert await page.value(f"{field}.value") == "One\na"
    await page.press("Escape")
    assert await page.text(".user .text") == "One"
    await page.click(".assistant [aria-label=Edit]")
    await page.value(f"{field}.value = 'Two'")
    await page.press("Enter")
    await page.until("document.querySelector('.assistant .prose')?.innerText === 'Two'")
    # On a touch screen Enter begins a line here, too.
    await page.size(390, 844, phone=True)
    await page.click(".assistant [aria-label=Edit]")
    await page.press("Enter")
    await page.press("b", "b")
    assert await page.value(f"{field}.value") == "Two\nb"
    assert page.troubles == []


async def test_errors_lose_nothing(page: Page) -> None:
    long = "word " * (CONTEXT + 1)
    await send(page, long)
    await page.until(f"document.querySelector('.failure')?.innerText.includes('{CONTEXT}')")
    assert (await page.text(".user .text")).strip() == long.strip()
    assert await page.count(".figures span") == 0
    # Without a server: what was written stands there, and is asked again.
    await page.click(".new-chat")
    await page.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1,
                    uploadThroughput=-1)  # fmt: skip
    await send(page, "Is somebody there?")
    await page.until("document.querySelector('.failure')?.innerText.includes('cannot be reached')")
    assert await page.text(".user .text") == "Is somebody there?"
    await page.call("Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1,
                    uploadThroughput=-1)  # fmt: skip
    await page.click(".failure button")
    await page.until("document.querySelector('.figures span')")
    assert await page.texts(".user .text") == ["Is somebody there?"]
    assert await page.count("article") == 2
    assert await page.count(".failure:not([hidden])") == 0
    assert asked(page)[-1]["messages"] == [{"role": "user", "content": "Is somebody there?"}]


async def test_images_where_the_model_takes_them(page: Page, pages: str) -> None:
    assert await page.value("document.getElementById('attach').ariaLabel") == "Attach text files"
    model = {
        "id": MODEL,
        "object": "model",
        "parent": None,
        "max_model_len": 8192,
        "input_modalities": ["text", "image"],
    }
    await page.answer_for_server("/v1/models", "application/json", json.dumps({"object": "list", "data": [model]}))
    await load(page, f"{pages}/")
    await page.until("document.getElementById('attach').ariaLabel === 'Attach images and text files'")
    await page.value(
        "(async () => { const canvas = document.createElement('canvas'); canvas.width = canvas.height = 8;"
        "const blob = await new Promise((take) => canvas.toBlob(take)); const data = new DataTransfer();"
        "data.items.add(new File([blob], 'dot.png', {type: 'image/png'})); const files = document.getElementById('files');"
        "files.files = data.files; files.dispatchEvent(new Event('change')); })()"
    )
    await page.until("document.querySelector('#attached img')?.naturalWidth === 8")
    await send(page, "What is this?")
    await page.until(ENDED.format(1))
    image, text = asked(page)[-1]["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "What is this?"}
    assert await page.value("document.querySelector('article.user img').naturalWidth") == 8
    assert await page.count("#attached img") == 0
    # This server's model takes none, and its refusal is shown.
    assert "Images are not supported" in await page.text(".failure")


async def test_api_page(debugger: str, pages: str) -> None:
    async with tab(debugger, f"{pages}/docs") as page:
        await page.until("document.querySelectorAll('#endpoints details').length > 8")
        await page.value(
            "[...document.querySelectorAll('#endpoints details')].find((one) => "
            "one.textContent.includes('/version')).querySelector('button').click()"
        )
        await page.until("[...document.querySelectorAll('pre')].some((one) => one.textContent.includes('\"version\"'))")
        assert page.troubles == []
