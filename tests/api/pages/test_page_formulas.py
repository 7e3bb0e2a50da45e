"""Formulas on the chat page: typeset by the browser, and harmless whatever a model writes."""

from __future__ import annotations

import pytest

from tests.api.pages.browser import Page, answered

pytestmark = pytest.mark.rest

MATHS = """The root \\(x = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a}\\) and $e^{i\\pi} = -1$ cost $5 and $6.

\\[
\\begin{pmatrix} a & b \\\\ c & d \\end{pmatrix} \\in \\mathbb{R}^{2 \\times 2}
\\]

$$\\sum_{i=1}^{n} i = \\frac{n(n+1)}{2}$$

| formula | |
| --- | --- |
| $a_1 * b_2 * c$ | $\\nosuchcommand{x}$ |

$$\\int_0^1 x"""


async def test_formulas_are_typeset(page: Page) -> None:
    await answered(page, MATHS)
    formulas = ".prose .typeset > math"
    assert await page.count(formulas) == 5
    # Elements of MathML, which browsers lay out and screen readers read.
    assert (
        await page.value(f"document.querySelector('{formulas}').namespaceURI") == "http://www.w3.org/1998/Math/MathML"
    )
    assert await page.count(f"{formulas} mfrac msqrt") == 1
    fraction = "document.querySelector('mfrac')"
    assert await page.value(
        f"{fraction}.children[0].getBoundingClientRect().bottom <= {fraction}.children[1].getBoundingClientRect().top"
    )
    assert await page.count("div.typeset > math[display=block] mtable mtd") == 4
    assert "ℝ" in await page.text("div.typeset")
    assert await page.count("td .typeset > math") == 1
    # What is no formula, is not understood or is not complete stays as it was written.
    assert "cost $5 and $6." in await page.text(".prose")
    assert await page.texts(".math:not(.typeset)") == ["$\\nosuchcommand{x}$", "$$\\int_0^1 x"]
    # What is told to screen readers while it comes is what was written.
    assert "\\frac{n(n+1)}{2}" in await page.value("document.getElementById('announcer').textContent")
    assert page.troubles == []


FORMULAS = (
    r"\href{javascript:window.hacked=1}{x}", r"\url{javascript:window.hacked=2}", r"\class{danger}{x}", r"\id{log}{x}",
    r"\style{position:fixed;inset:0}{x}", r"\data{a=1}{x}", r"\includegraphics{https://example.org/track.png}",
    r"\text{<img src=x onerror='window.hacked=3'>}", r"<script>window.hacked = 4</script>", r"\htmlId{log}{x}",
    r"\begin{equation}\label{log} x \end{equation} \ref{log} \eqref{log}", r"\rule{9000em}{9000em}", r"\kern{-9000em} x",
    r"\raisebox{9000em}{x}", r"\color{red;position:fixed} x", r"\textcolor{url(https://example.org/a)}{x}",
    r"\def\a{\a\a}\a", r"\newcommand\b{xxxxxxxx}\b", r"\unicode{x3c}script", r"\char\"3C script>", r"\html{<b>}",
    r"\sqrt{" * 2000 + "x" + "}" * 2000, r"\sqrt" * 1500 + " x", "{" * 3000 + "x" + "}" * 3000, "x^" * 2000 + "x",
    r"\begin{matrix}" * 200 + "x" + r"\end{matrix}" * 200, r"\tag{<img src=x onerror=window.hacked=5>} x",
)  # fmt: skip


async def test_formulas_do_nothing_else(page: Page, pages: str) -> None:
    page.requests.clear()
    await answered(page, "\n\n".join(f"$${formula}$$\n\nand \\({formula}\\)." for formula in FORMULAS) + "\n\n$x$ end")
    assert await page.count(".prose .typeset") > 10
    assert await page.value("window.hacked") is None
    assert await page.value(
        "[...document.querySelectorAll('.typeset *')].every((one) => /MathML$/.test(one.namespaceURI)"
        " && !one.getAttributeNames().some((name) => /^on|href|src|^id$|^name$/.test(name)))"
    )
    assert await page.count("[id=log]") == 1
    # Their styles are a few lengths and colours, and none of them leaves its place.
    styles = "[...document.querySelectorAll('.typeset [style]')].flatMap((one) => [...one.style])"
    found = set(await page.value(styles))
    assert not {
        name for name in found if name.startswith(("inset", "z-index", "background", "content", "mask", "filter"))
    }
    assert await page.value(
        "[...document.querySelectorAll('.typeset *')].every((one) => !/fixed|sticky/.test(getComputedStyle(one).position))"
    )
    assert await page.value("document.getElementById('log').scrollWidth <= document.getElementById('log').clientWidth")
    asked = {request["url"].removeprefix(pages) for request in page.requests}
    assert {one for one in asked if not one.startswith("/static/")} == {"/v1/chat/completions"}
    assert page.troubles == []
