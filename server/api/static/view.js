// The conversation that is looked at: its messages as elements, kept up with while an answer comes.

import { sizeOf } from "./attachments.js";
import { canContinue, path, versions } from "./conversation.js";
import { announce, at, copyFrom, element, icon, iconButton } from "./dom.js";
import { editForm } from "./edit.js";
import { figures } from "./figures.js";
import { show } from "./markdown.js";

/** What the buttons of messages do; app.js fills them in: regenerate, resume, edit, retry, showVersion (of a message). */
export const actions = {};

let conversation = null;
/** By a message's id: its article. */
const articles = new Map();
let following = true;
let waiting = null;

/** Show a conversation from the beginning. */
export function showConversation(shownNow) {
  conversation = shownNow;
  cancelFrame();
  articles.clear();
  const branch = path(conversation);
  at("messages").replaceChildren(...branch.map(article));
  at("welcome").hidden = branch.length > 0;
  followAgain();
}

/** Show what another tab has changed of the conversation, at the place where it is read. */
export function showAgain() {
  const [top, followed] = [log.scrollTop, following];
  showConversation(conversation);
  if (followed) return;
  log.scrollTop = lastTop = top;
  following = false;
  at("to-end").hidden = false;
}

/** Whether a message is being edited. */
export const isEditing = () => at("messages").querySelector(".editing") !== null;

/** A message of the conversation has changed; what a stream adds is drawn as fast as drawing goes. */
export function messageChanged(message) {
  if (!articles.has(message.id)) {
    // Another tab's answer may be in a branch that is not shown here.
    if (!path(conversation).includes(message)) return;
    at("messages").append(article(message));
    at("welcome").hidden = true;
    keepUp();
  } else if (message.state !== "running") {
    cancelFrame();
    update(message);
  } else waiting ??= { message, timer: setTimeout(draw, waitMs) };
}

let waitMs = 40;

function draw() {
  const { message } = waiting;
  waiting = null;
  const started = performance.now();
  update(message);
  // A long answer takes longer to draw; three quarters of the time stay for everything else.
  waitMs = Math.max(40, 3 * (performance.now() - started));
}

function cancelFrame() {
  clearTimeout(waiting?.timer);
  waiting = null;
}

function article(message) {
  const made = message.role === "user" ? question(message) : answerArticle(message);
  articles.set(message.id, made);
  return made;
}

function question(message) {
  const made = element("article", { class: "user", "aria-label": "You", "data-id": message.id });
  const box = element("div", { class: "bubble" });
  if (message.images?.length)
    box.append(element("div", { class: "images" }, ...message.images.map((src) => element("img", { src, alt: "attached image" }))));
  for (const file of message.files ?? []) box.append(attachedFile(file));
  if (message.content) box.append(element("div", { class: "text", text: message.content }));
  made.append(box, element("footer", {}, actionRow(message, [["Edit", "edit", () => edit(message)]])));
  return made;
}

function attachedFile(file) {
  const summary = element("summary", {}, icon("file"), element("span", { class: "name", text: file.name }), element("small", { text: sizeOf(file) }));
  return element("details", { class: "file" }, summary, element("pre", { tabindex: "0", text: file.text }));
}

function answerArticle(message) {
  const made = element(
    "article",
    { class: "assistant", "aria-label": "Answer", "data-id": message.id },
    element("details", { class: "thoughts", hidden: true }, element("summary"), element("div", { class: "text" })),
    element("div", { class: "prose" }),
    element("p", { class: "waits", hidden: true }),
    element("p", { class: "failure", role: "alert", hidden: true }),
    element("footer", { hidden: true }),
  );
  fill(made, message);
  return made;
}

function update(message) {
  const made = articles.get(message.id);
  if (!made || made.classList.contains("editing")) return;
  fill(made, message);
  keepUp();
}

function fill(made, message) {
  const [thoughts, prose, waits, failure, footer] = made.children;
  const going = message.state === "running";
  made.setAttribute("aria-busy", String(going));
  made.classList.toggle("waiting", going && !message.content);
  thoughts.hidden = !message.reasoning;
  thoughts.classList.toggle("going", going && !message.content);
  thoughts.firstChild.textContent = message.thoughtFor === undefined ? "Thinking…" : `Thought for ${message.thoughtFor.toFixed(1)} s`;
  if (thoughts.lastChild.textContent !== message.reasoning) thoughts.lastChild.textContent = message.reasoning ?? "";
  const wasGoing = made.dataset.going === "true";
  made.dataset.going = String(going);
  const told = show(prose, message.content, { complete: !going, resumed: going && !wasGoing });
  if (going || wasGoing) told.forEach((text) => announce(text));
  waits.hidden = !(going && message.waiting);
  waits.textContent = message.waiting ? `${message.waiting} The message goes by itself.` : "";
  failure.hidden = !message.error;
  if (message.error && !going)
    failure.replaceChildren(element("span", { text: message.error }), element("button", { type: "button", text: "Try again", click: () => actions.retry(message) }));
  footer.hidden = going && !message.usage;
  footer.replaceChildren(...(going ? [] : [answerActions(message)]), figures(message));
}

function answerActions(message) {
  const buttons = [["Edit", "edit", () => edit(message)]];
  if (!message.error) buttons.unshift(["Regenerate", "again", () => actions.regenerate(message)]);
  const row = actionRow(message, buttons);
  if (canContinue(conversation, message))
    row.append(element("button", { type: "button", class: "quiet resume", click: () => actions.resume(message) }, icon("on"), "Continue"));
  return row;
}

function actionRow(message, buttons) {
  const row = element("div", { class: "actions" });
  const all = versions(conversation, message);
  if (all.length > 1) {
    const place = all.indexOf(message);
    const other = (label, drawing, step) =>
      iconButton(label, drawing, () => actions.showVersion(all[place + step]), { disabled: !all[place + step] });
    row.append(other("Earlier version", "left", -1), element("span", { class: "count", text: `${place + 1}/${all.length}` }), other("Later version", "right", 1));
  }
  if (message.content) {
    const copyButton = iconButton("Copy", "copy", () => copyFrom(copyButton, message.content));
    row.append(copyButton);
  }
  for (const [label, drawing, click] of buttons) row.append(iconButton(label, drawing, click));
  return row;
}

/** Change a message in its place; what comes of it stands beside what was there. */
export function edit(message) {
  const made = articles.get(message.id);
  const before = [...made.childNodes];
  const close = () => {
    made.classList.remove("editing");
    made.replaceChildren(...before);
    made.querySelector('[aria-label="Edit"]')?.focus();
  };
  const form = editForm(message, close, (text) => actions.edit(message, text));
  made.classList.add("editing");
  made.replaceChildren(form);
  form.querySelector("textarea").focus();
}

// --- the end of a growing conversation stays in sight, unless somebody has gone up to read

const log = at("log");
let lastTop = 0;

log.addEventListener(
  "scroll",
  () => {
    const below = log.scrollHeight - log.clientHeight - log.scrollTop;
    // The event of toEnd()'s own scrolling may come behind a wheel's.
    if (log.scrollTop === lastTop) return;
    // A wheel's scrolling begins with a few pixels. Where a conversation gets shorter, the end itself comes up.
    if (log.scrollTop < lastTop && below >= 1) following = false;
    else if (below < 32) following = true;
    lastTop = log.scrollTop;
    at("to-end").hidden = following;
  },
  { passive: true },
);

// Before the first pixel: what is drawn in between would take it back.
log.addEventListener(
  "wheel",
  (event) => {
    if (event.deltaY < 0 && log.scrollTop > 0) following = false;
  },
  { passive: true },
);

function keepUp() {
  if (following) toEnd();
  else at("to-end").hidden = false;
}

function toEnd() {
  log.scrollTop = log.scrollHeight;
  lastTop = log.scrollTop;
}

/** Go to the end, and stay there. */
export function followAgain() {
  following = true;
  at("to-end").hidden = true;
  toEnd();
}

at("to-end").append(icon("down"));
at("to-end").addEventListener("click", followAgain);
new ResizeObserver(keepUp).observe(log);
