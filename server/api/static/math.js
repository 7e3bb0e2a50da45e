// Where formulas are: a markdown-it plugin that takes what stands between TeX's marks out of Markdown's hands.

const INLINE = [
  ["\\(", "\\)"],
  ["\\[", "\\]"],
  ["$$", "$$"],
];

/** Where an inline formula that begins at start ends, or -1. */
function inlineEnd(text, start, most) {
  for (const [open, close] of INLINE) {
    if (!text.startsWith(open, start)) continue;
    const end = text.indexOf(close, start + open.length);
    return end < 0 || end + close.length > most || end === start + open.length ? -1 : end + close.length;
  }
  // Pandoc's rule for single dollars, so that prices stay what they are.
  if (text[start] !== "$" || !/\S/.test(text[start + 1] ?? " ")) return -1;
  for (let i = start + 1; i < most && text[i] !== "\n"; i++) {
    if (text[i] === "\\") i++;
    else if (text[i] === "$" && /\S/.test(text[i - 1]) && !/\d/.test(text[i + 1] ?? "")) return i + 1;
  }
  return -1;
}

function inlineRule(state, silent) {
  const end = inlineEnd(state.src, state.pos, state.posMax);
  if (end < 0) return false;
  if (!silent) state.push("math", "span", 0).content = state.src.slice(state.pos, end);
  state.pos = end;
  return true;
}

/** Lines from one that begins with \[ or $$ to the one that ends with the counterpart; to the end while it is missing. */
function blockRule(state, first, last, silent) {
  const line = (n) => state.src.slice(state.bMarks[n] + state.tShift[n], state.eMarks[n]);
  const open = ["\\[", "$$"].find((mark) => line(first).startsWith(mark));
  if (!open) return false;
  const close = open === "$$" ? "$$" : "\\]";
  let end = first;
  for (; end < last; end++) {
    const rest = end === first ? line(end).slice(open.length) : line(end);
    if (rest.trimEnd().endsWith(close)) break;
    if (rest.includes(close)) return false;
  }
  if (silent) return true;
  state.line = Math.min(end + 1, last);
  const token = state.push("math_block", "div", 0);
  token.content = state.getLines(first, state.line, state.blkIndent, false);
  token.map = [first, state.line];
  return true;
}

export function math(markdown) {
  markdown.inline.ruler.before("escape", "math", inlineRule);
  markdown.block.ruler.before("fence", "math_block", blockRule, { alt: ["paragraph", "reference", "blockquote", "list"] });
  const escape = markdown.utils.escapeHtml;
  markdown.renderer.rules.math = (tokens, i) => `<span class="math">${escape(tokens[i].content)}</span>`;
  markdown.renderer.rules.math_block = (tokens, i) => `<div class="math">${escape(tokens[i].content)}</div>\n`;
}
