"""Display of the chat page, and of what models write: safe, readable, small, usable without a pointer."""

from __future__ import annotations

import pytest

from tests.api.pages.browser import ENDED, ENDLESS, Page, answered, choose_files, paste, pasted, send

pytestmark = pytest.mark.rest

MARKDOWN = """# Heading

Some *soft*, **strong** text and `code`, see main.py and https://example.org/a_b.

| left | right |
| :--- | ---: |
| a | 1 |

```python
def f(x):
    return x * 2  # twice
```

Inline \\(a_1 * b_2 * c\\) and $x_i^2 * y_i$, but $5 and $6.

\\[
\\sum_{i=1}^n *x*_i \\\\ <b>
\\]

1. one
2. two
"""
HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">

[a](javascript:window.hacked=3) [b](data:text/html,<script>alert(1)</script>) [c](https://example.org "onclick=x")
![picture](https://example.org/track.png) ![x](javascript:window.hacked=4) <javascript:window.hacked=5>
<iframe src="https://example.org"></iframe><svg onload="window.hacked = 6"><a xlink:href="javascript:1">z</a></svg>

```html" onmouseover="window.hacked = 7
<script>window.hacked = 8</script>
```

$<img src=x onerror="window.hacked = 9">$ \\(<script>window.hacked = 10</script>\\)

| <img src=x onerror=window.hacked=11> | <style>*{display:none}</style> |
| :-: | - |
| <form action="https://example.org"><input name=a></form> | <base href="https://example.org/"> |

[d][e] <a href="vbscript:1" onclick="window.hacked = 12">d</a>

[e]: javascript:window.hacked=13 "title"
"""


async def test_markdown(page: Page) -> None:
    await answered(page, MARKDOWN)
    assert await page.text(".prose h1") == "Heading"
    assert await page.text(".prose strong") == "strong"
    # A file's name is no address; an address is one, and is opened beside the page.
    assert await page.value(
        "[...document.querySelectorAll('.prose a')].map((one) => [one.href, one.target, one.rel])"
    ) == [["https://example.org/a_b", "_blank", "noopener noreferrer"]]
    assert await page.texts(".prose td") == ["a", "1"]
    assert await page.value("getComputedStyle(document.querySelectorAll('.prose td')[1]).textAlign") == "right"
    assert await page.texts(".prose li") == ["one", "two"]
    assert await page.count(".prose .math") == await page.count(".prose .typeset > math") == 3
    assert "but $5 and $6." in await page.text(".prose")
    assert await page.text(".prose .hljs-keyword, .prose .hljs-title") == "def"
    assert (await page.texts(".figures span"))[0] == "finished"
    assert page.troubles == []


async def test_code_is_copied(page: Page) -> None:
    await answered(page, MARKDOWN)
    await page.click(".copy-code")
    await page.until("document.querySelector('.copy-code.done')")
    assert await pasted(page) == "def f(x):\n    return x * 2  # twice"
    await page.click(".assistant [aria-label=Copy]")
    await page.until("document.querySelector('.actions .done')")
    assert await pasted(page) == MARKDOWN


async def test_what_a_model_writes_does_nothing(page: Page, pages: str) -> None:
    page.requests.clear()
    await answered(page, HOSTILE, reasoning_content=HOSTILE)
    await page.click(".thoughts summary")
    await page.value(
        "document.querySelectorAll('.prose *').forEach((one) => one.dispatchEvent(new Event('mouseover')))"
    )
    assert "<script>window.hacked = 1</script>" in await page.text(".prose")
    assert await page.value("window.hacked") is None
    forbidden = "script, img, iframe, svg:not(.icon), form, input, style, base, object"
    assert await page.count(", ".join(f".assistant .prose {one}" for one in forbidden.split(", "))) == 0
    assert await page.value("[...document.querySelectorAll('.prose a')].every((one) => /^https?:$/.test(one.protocol))")
    assert await page.value(
        "[...document.querySelectorAll('.prose *')].flatMap((one) => one.getAttributeNames())"
        ".every((name) => !/^on/.test(name))"
    )
    assert await page.value("[...document.querySelectorAll('.prose [style]')].every((one) => one.closest('math'))")
    asked = {request["url"].removeprefix(pages) for request in page.requests}
    assert {one for one in asked if not one.endswith("/favicon.svg")} == {"/v1/chat/completions"}
    assert await page.value("document.querySelector('.thoughts .text').children.length") == 0
    assert page.troubles == []


async def test_a_growing_answer_keeps_its_elements(page: Page) -> None:
    await page.set("[name=max_tokens]", ENDLESS)
    await page.set("[name=temperature]", "1")
    await send(page, "Write a list of all countries, each with its capital.")
    blocks = "document.querySelectorAll('.assistant .prose > *')"
    await page.until(f"{blocks}.length >= 2")
    await page.value(f"{blocks}[0].marked = true")
    length = await page.value(f"{blocks}.length")
    await page.until(f"{blocks}.length > {length}")
    assert await page.value(f"{blocks}[0].marked")
    # What is complete is told to screen readers, what grows is not.
    assert await page.value("document.querySelector('article.assistant').getAttribute('aria-busy')") == "true"
    assert "The model is answering." in await page.text("#announcer")
    await page.press("Escape")
    await page.until(ENDED.format(1))
    assert (await page.value("document.getElementById('announcer').innerText")).endswith("The answer is stopped.")
    assert await page.value("document.getElementById('announcer').ariaLive") == "polite"


CONTRAST = """(() => {
  const probe = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = (colour, under) => {
    probe.fillStyle = under; probe.fillRect(0, 0, 1, 1); probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (parts) => parts.map((part) => part / 255)
    .map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (one) => {
    const layers = [];
    for (let at = one; at; at = at.parentElement) layers.push(getComputedStyle(at).backgroundColor);
    return layers.reverse().reduce((under, colour) => `rgb(${rgb(colour, under).join(' ')})`, 'white');
  };
  const poor = [];
  for (const one of document.querySelectorAll('body *')) {
    const hasText = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!(hasText || one.matches('input, textarea, select')) || !one.checkVisibility({visibilityProperty: true})) continue;
    if (one.closest('.unseen, option, :disabled') || !one.getClientRects().length) continue;
    const under = ground(one);
    const [a, b] = [light(rgb(getComputedStyle(one).color, under)), light(rgb(under, 'white'))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const name = `${one.tagName} ${one.className || one.id} ${one.textContent.slice(0, 30)}`;
    if (ratio < 4.5) poor.push(`${name}: ${ratio.toFixed(2)}`);
  }
  return poor;
})()"""


async def stop_short(page: Page) -> None:
    """Have the answer written anew: it is short, and says that it may go on."""
    await page.click(".assistant [aria-label=Edit]")
    await page.press("End")
    await page.press("x", "x")
    await page.press("Enter")
    await page.until("document.querySelector('.assistant .resume')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_everything_can_be_read(page: Page, pages: str, scheme: str) -> None:
    await page.scheme(scheme)
    await choose_files(page, ("a.py", "text/x-python", "print(1)"))
    await page.until("document.querySelector('#attached .file')")
    await answered(page, f"{MARKDOWN}\n\n$$\\frac{{a}}{{b}}$$", reasoning_content="Hm.")
    await page.click("article.user .file summary")
    await stop_short(page)
    await paste(page, "A long text. " * 400)
    assert await page.visible(".resume")
    assert await page.visible("#attached .file")
    await page.value(
        "Object.assign(document.getElementById('context'), {hidden: false, textContent: '9', className: 'full'})"
    )
    assert await page.value(CONTRAST) == []
    ground = await page.value("getComputedStyle(document.documentElement).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
    await page.value("document.querySelector('.open-settings').click()")
    assert await page.value(CONTRAST) == []
    await page.go(f"{pages}/docs")
    await page.until("document.querySelectorAll('#endpoints details').length > 8")
    assert await page.value(CONTRAST) == []


async def test_on_a_phone(page: Page) -> None:
    wide = "x" * 300
    await answered(
        page, f"{MARKDOWN}\n\n{wide}\n\n```\n{wide}\n```\n\n| {' | '.join(['wide column'] * 9)} |\n|{'---|' * 9}\n"
    )
    await page.size(390, 844, scale=2, phone=True)
    await page.until("innerWidth === 390")
    assert await page.value("document.documentElement.scrollWidth") == 390
    assert await page.value("document.getElementById('log').scrollWidth") == 390
    right = "[...document.querySelectorAll('header *, #composer *')].map((one) => one.getBoundingClientRect().right)"
    assert max(await page.value(right)) <= 390
    shown = "document.getElementById('sidebar').checkVisibility({visibilityProperty: true})"
    await page.until(f"!{shown}")
    await page.click("#list-button")
    await page.until(shown)
    await page.click(".item a")
    await page.until(f"!{shown}")
    # On a touch screen Enter begins a line.
    await page.value("document.getElementById('text').focus()")
    await page.press("a", "a")
    await page.press("Enter")
    await page.press("b", "b")
    assert await page.value("document.getElementById('text').value") == "a\nb"


async def test_everything_has_a_name_and_can_be_reached(page: Page) -> None:
    await choose_files(page, ("a.py", "text/x-python", "print(1)"))
    await page.until("document.querySelector('#attached .file')")
    await answered(page, MARKDOWN)
    await stop_short(page)
    await paste(page, "A long text. " * 400)
    for dialog in (None, "settings", "rename"):
        if dialog:
            await page.value(f"document.getElementById('{dialog}').showModal()")
        nodes = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        controls = [
            node
            for node in nodes
            if not node["ignored"]
            and node["role"]["value"] in ("button", "textbox", "combobox", "link", "searchbox", "spinbutton")
        ]
        assert len(controls) > (2 if dialog else 8)
        assert [node for node in controls if not node.get("name", {}).get("value")] == []
        if dialog:
            await page.value(f"document.getElementById('{dialog}').close()")
    # With Tab alone: from the skip link to the field, with a focus that is seen.
    await page.value("document.activeElement.blur()")
    await page.press("Tab")
    reached = set()
    for _ in range(40):
        reached.add(
            await page.value("[document.activeElement].map((one) => one.id || one.ariaLabel || one.className)[0]")
        )
        await page.press("Tab")
    assert {
        "search",
        "model",
        "text",
        "send",
        "chat-menu",
        "Regenerate",
        "quiet copy-code",
        "quiet resume",
        "attach",
    } <= reached
    assert {"Put into the message", "Remove Pasted text"} <= reached
    # The menu goes with arrows and Escape, and gives the focus back.
    await page.value("document.getElementById('chat-menu').focus()")
    await page.press("Enter")
    await page.until("document.querySelector('#menu:popover-open')")
    await page.press("ArrowDown")
    assert await page.value("document.activeElement.innerText") == "Export as Markdown"
    await page.press("Escape")
    await page.until("!document.querySelector('#menu:popover-open')")
    assert await page.value("document.activeElement.id") == "chat-menu"
