// Formulas in TeX as MathML, which the browser typesets. They are a model's: nothing in them names an address, an id or a
// script, they define no commands, and what comes of them passes DOMPurify's list.

import "./vendor/purify.min.js";

// A classic script, which chat.html loads before the modules.
const { DOMPurify, temml } = globalThis;

const MARKS = /^\s*(?:\$\$([^]*)\$\$|\\\[([^]*)\\\]|\\\(([^]*)\\\)|\$([^]*)\$)\s*$/;
// Definitions end with their formula, so that they are of no use here but to make a short text long.
const DEFINES = /\\(?:[egx]?def|let|futurelet|global|long|(?:new|renew|provide)command|DeclareMathOperator)(?![a-zA-Z])/;
const MAX_LENGTH = 8000;
// Deep trees are slow to lay out, or too much for a browser.
const TOO_DEEP = `:scope ${"> * ".repeat(120)}`;
const TEX = { throwOnError: true, trust: false, maxExpand: 1000, maxSize: [20, 100] };
const MATHML = {
  USE_PROFILES: { mathMl: true },
  ADD_ATTR: ["class", "form", "style"],
  FORBID_ATTR: ["href", "id", "name", "xlink:href"],
  FORBID_TAGS: ["maction", "mglyph"],
  IN_PLACE: true,
};

/** Typeset the formula that is an element's text, with its marks; one that is not complete or not understood stays text. */
export function typeset(place) {
  const found = MARKS.exec(place.textContent);
  const tex = found?.slice(1).find((part) => part !== undefined);
  if (!tex || tex.length > MAX_LENGTH || DEFINES.test(tex)) return;
  const made = document.createElement("span");
  try {
    temml.render(tex, made, { ...TEX, displayMode: found[1] !== undefined || found[2] !== undefined });
  } catch {
    return;
  }
  if (made.querySelector(TOO_DEEP)) return;
  place.replaceChildren(DOMPurify.sanitize(made.firstChild, MATHML));
  place.classList.add("typeset");
}
