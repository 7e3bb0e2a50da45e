// A model's text as elements: Markdown, coloured code with a button to copy it, typeset formulas. The text is not trusted:
// HTML in it stays text, and what is rendered passes DOMPurify's list before it meets the document.

import { copyFrom, element, icon } from "./dom.js";
import { typeset } from "./formulas.js";
import { math } from "./math.js";
import highlighter from "./vendor/highlight.min.js";
import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";
import "./vendor/purify.min.js";

const { DOMPurify } = globalThis;

const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "s",
    "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["class", "href", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const MOST_COLOURED = 50000;
const MOST_REMEMBERED = 200;

const coloured = new Map();

/** Code as highlight.js colours it; "" leaves it plain. Remembered, as a stream renders its code again and again. */
function colour(code, language) {
  if (!highlighter.getLanguage(language) || code.length > MOST_COLOURED) return "";
  const name = `${language}\n${code}`;
  let html = coloured.get(name);
  if (html === undefined) {
    html = highlighter.highlight(code, { language, ignoreIllegals: true }).value;
    if (coloured.size >= MOST_REMEMBERED) coloured.delete(coloured.keys().next().value);
    coloured.set(name, html);
  }
  return html;
}

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true, highlight: colour });
// Only addresses with a scheme are links: main.py is a file, not a site in Paraguay.
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
markdown.use(math);
// Nothing is loaded from elsewhere: an image is a link to it.
markdown.renderer.rules.image = (tokens, i) => {
  const escape = markdown.utils.escapeHtml;
  const address = escape(tokens[i].attrGet("src"));
  return `<a href="${address}">${escape(tokens[i].content) || address}</a>`;
};
// The page's policy forbids style attributes, which a table's columns are aligned with.
for (const cell of ["td_open", "th_open"])
  markdown.renderer.rules[cell] = (tokens, i, options, _, renderer) => {
    const align = tokens[i].attrGet("style")?.split(":")[1];
    if (align) tokens[i].attrs = [["class", `align-${align}`]];
    return renderer.renderToken(tokens, i, options);
  };

function codeBox(block) {
  const code = block.querySelector("code") ?? block;
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
  const button = element("button", { type: "button", class: "quiet copy-code", click: () => copyFrom(button, code.textContent.replace(/\n$/, "")) }, icon("copy"), "Copy");
  block.tabIndex = 0;
  const box = element("div", { class: "code" }, element("div", { class: "code-head" }, element("span", { text: language }), button));
  block.replaceWith(box);
  box.append(block);
}

function finish(block) {
  const all = (selector) => [...(block.matches(selector) ? [block] : []), ...block.querySelectorAll(selector)];
  for (const link of all("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  const holder = element("div", {}, block);
  holder.querySelectorAll("table").forEach((table) => {
    const box = element("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(box);
    box.append(table);
  });
  holder.querySelectorAll("pre").forEach(codeBox);
  holder.querySelectorAll(".math").forEach(typeset);
  return holder.firstChild;
}

/** A text's blocks as elements, each with its HTML and its text: [{html, text(), element()}]; text() before element(). */
function blocks(text) {
  const safe = DOMPurify.sanitize(markdown.render(text), ALLOWED);
  return [...safe.children].map((block) => ({
    html: block.outerHTML,
    text: () => (block.querySelector("pre") ?? block).textContent,
    element: () => finish(block),
  }));
}

const shown = new WeakMap();

/**
 * Show a text in place. Blocks that are as they were stay the same elements, so that a growing text neither flickers nor
 * loses what is selected. Returns the texts of blocks that have become complete since the last call; the last block of a
 * text that goes on (resumed) is not complete any more.
 */
export function show(place, text, { complete = true, resumed = false } = {}) {
  const before = shown.get(place) ?? { html: [], told: 0 };
  const now = blocks(text);
  let same = 0;
  while (same < now.length && same < before.html.length && now[same].html === before.html[same]) same++;
  const ready = complete ? now.length : Math.max(0, now.length - 1);
  // Formulas are told in TeX, as they are written.
  const from = resumed ? Math.min(before.told, ready) : before.told;
  const told = now.slice(from, ready).map((block) => block.text());
  while (place.children.length > same) place.lastChild.remove();
  for (const block of now.slice(same)) place.append(block.element());
  shown.set(place, { html: now.map((block) => block.html), told: Math.max(from, ready) });
  return told;
}
