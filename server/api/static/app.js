// The chat page: puts store, server, list, composer and conversation together.

import { answer, isRunning, resume, runningHere, saveRunning, stop } from "./answering.js";
import { draft, isEmpty, setDraft, setRunning, startComposer } from "./composer.js";
import { add, newConversation, path, removeMessage, showVersion, titleOf } from "./conversation.js";
import { announce, at, toast } from "./dom.js";
import { contextUsed } from "./figures.js";
import { startMenu } from "./menu.js";
import { merge } from "./merge.js";
import { chosenModel, showModels } from "./models.js";
import { look, watchServer } from "./server.js";
import { checkForm, fillForm, readForm } from "./settings.js";
import { openMenu, showList, toggleSidebar } from "./sidebar.js";
import * as store from "./store.js";
import { actions, edit, followAgain, isEditing, messageChanged, showAgain, showConversation } from "./view.js";

/** By id; a new chat is among them from its first message on. */
const conversations = new Map();
/** What was being written in each of them. */
const drafts = new Map();
let current = newConversation(store.lastSettings());

// --- which conversation is open

function open(conversation, { focus = true } = {}) {
  if (conversation !== current) {
    drafts.set(current.id, draft());
    current = conversation;
    setDraft(drafts.get(current.id));
  }
  fillForm(current.settings);
  showConversation(current);
  refresh();
  toggleSidebar(false);
  const address = conversations.has(current.id) ? `#${current.id}` : location.pathname;
  if (location.hash !== (conversations.has(current.id) ? address : "")) history.pushState(null, "", address);
  if (focus && !matchMedia("(pointer: coarse)").matches) at("text").focus();
}

const newChat = () => open(newConversation({ ...store.lastSettings(), model: current.settings.model }));

function openFromAddress() {
  const named = conversations.get(location.hash.slice(1));
  if (named && named !== current) open(named);
  else if (!named && conversations.has(current.id)) newChat();
}

function refresh() {
  showList(conversations.values(), current.id);
  const title = titleOf(current);
  at("title").textContent = title;
  document.title = current.messages.length ? `${title} · NF4 server` : "NF4 server";
  at("chat-menu").hidden = !conversations.has(current.id);
  setRunning(isBusy());
  showModels(current.settings);
  showContext();
}

function showContext() {
  const used = contextUsed(path(current), chosenModel(current.settings)?.max_model_len);
  at("context").hidden = !used;
  at("context").textContent = used?.text ?? "";
  at("context").classList.toggle("full", used?.share > 0.9);
}

/** Whether an answer comes in the open conversation, here or in another tab. */
const isBusy = () => isRunning(current.id) || path(current).at(-1)?.state === "running";

function stopAnswer() {
  if (isRunning(current.id)) return stop(current.id);
  // It comes in another tab, if that tab is there still.
  store.tell({ stop: current.id });
  interrupt(current);
  showAgain();
  refresh();
}

/** No answer comes any more in what this page does not write itself. */
function interrupt(conversation) {
  if (isRunning(conversation.id)) return;
  for (const message of conversation.messages) if (message.state === "running") message.state = "interrupted";
}

const keep = (conversation) =>
  store.save(conversation).catch((error) => toast(`This conversation could not be kept: ${error.message}`));

function serverChanged(trouble) {
  const place = at("status");
  place.hidden = !trouble;
  if (trouble) place.firstElementChild.textContent = trouble.needsKey && !store.apiKey() ? "This server wants an API key." : trouble.text;
  at("enter-key").hidden = !trouble?.needsKey;
  refresh();
}

// --- sending and answering

function changed(conversation, message) {
  if (conversation === current) {
    messageChanged(message);
    showContext();
  }
  if (message.state === "running" && message.content) return;
  // It begins, or it has ended.
  refresh();
  if (message.state !== "running") announce(message.error ?? `The answer is ${message.state === "stopped" ? "stopped" : "complete"}.`);
}

/** Have an answer come: begin(model) starts it. */
async function ask(conversation, begin) {
  // The button that asked for it goes.
  if (at("messages").contains(document.activeElement) && !matchMedia("(pointer: coarse)").matches) at("text").focus();
  if (!chosenModel(conversation.settings)) await look();
  announce("The model is answering.", true);
  await begin(chosenModel(conversation.settings)?.id ?? "");
  // Deleted meanwhile, it stays deleted.
  if (conversations.has(conversation.id)) await keep(conversation);
}

const askAbout = (conversation, question) => ask(conversation, (model) => answer(conversation, question, model, changed));

function send({ text, images, files }) {
  if (!checkForm()) return false;
  if (isBusy()) return false;
  const isNew = !conversations.has(current.id);
  conversations.set(current.id, current);
  const question = add(current, current.leaf, { role: "user", content: text, images, files });
  if (isNew) history.pushState(null, "", `#${current.id}`);
  messageChanged(question);
  followAgain();
  keep(current);
  askAbout(current, question.id);
  return true;
}

function branchOff(change) {
  if (isBusy()) {
    toast("An answer is under way; stop it first.");
    return;
  }
  const question = change();
  // The answer to come takes the place of the one that was there.
  if (question) current.leaf = question;
  showConversation(current);
  refresh();
  keep(current);
  if (question) askAbout(current, question);
}

actions.regenerate = (message) => checkForm() && branchOff(() => message.parent);
actions.resume = (message) => {
  const conversation = current;
  if (checkForm() && !isBusy()) ask(conversation, (model) => resume(conversation, message, model, changed));
};
actions.retry = (message) =>
  branchOff(() => {
    // A failed answer without a text is nothing to keep.
    if (!message.content) removeMessage(current, message);
    return message.parent;
  });
actions.showVersion = (message) => branchOff(() => void showVersion(current, message));
actions.edit = (message, text) =>
  branchOff(() => {
    const { role, images, files, model } = message;
    if (role === "user") return add(current, message.parent, { role, images, files, content: text }).id;
    add(current, message.parent, { role, model, content: text, state: "edited" });
    return undefined;
  });

// --- everything that is clicked, typed or happens

startComposer(send, stopAnswer);
for (const button of document.querySelectorAll(".new-chat")) button.addEventListener("click", newChat);
at("chat-menu").addEventListener("click", () => openMenu(at("chat-menu"), current.id));
at("list-button").addEventListener("click", () => toggleSidebar());
at("shade").addEventListener("click", () => toggleSidebar(false));
// Also of the conversation that is open already, whose address changes nothing.
at("conversations").addEventListener("click", (event) => event.target.closest("a") && toggleSidebar(false));
at("search").addEventListener("input", () => showList(conversations.values(), current.id));
at("model").addEventListener("change", () => settingsChanged({ model: at("model").value }));
for (const button of document.querySelectorAll(".open-settings")) button.addEventListener("click", () => at("settings").showModal());
at("enter-key").addEventListener("click", () => at("key").focus());
for (const example of document.querySelectorAll("#examples button"))
  example.addEventListener("click", () => {
    setDraft({ text: example.textContent });
    at("text").focus();
  });

function settingsChanged(more = {}) {
  Object.assign(current, { settings: { ...readForm(), model: current.settings.model, ...more }, edited: Date.now() });
  store.keepSettings(current.settings);
  if (conversations.has(current.id)) keep(current);
  refresh();
}

at("settings-form").addEventListener("input", () => settingsChanged());
at("reset-sampling").addEventListener("click", () => {
  fillForm({ system: current.settings.system });
  settingsChanged();
});
at("key").value = store.apiKey();
at("key").addEventListener("change", () => {
  store.keepApiKey(at("key").value.trim());
  look();
});
startMenu({ conversations, keep, open, refresh, removed: (conversation) => (conversation === current ? newChat() : refresh()) });

document.addEventListener("keydown", (event) => {
  if (event.isComposing || document.querySelector("dialog[open], :popover-open")) return;
  const command = event.ctrlKey || event.metaKey;
  if (event.key === "Escape") {
    if (document.body.classList.contains("listing")) toggleSidebar(false);
    else if (isBusy()) stopAnswer();
  } else if (command && event.shiftKey && event.key.toLowerCase() === "o") newChat();
  else if (command && event.key.toLowerCase() === "k") {
    toggleSidebar(true);
    at("search").focus();
  } else if (event.key === "ArrowUp" && event.target === at("text") && isEmpty(draft())) {
    const last = path(current).findLast((message) => message.role === "user");
    if (!last || isBusy()) return;
    edit(last);
  } else return;
  event.preventDefault();
});
addEventListener("popstate", openFromAddress);
addEventListener("pagehide", () => {
  const left = runningHere();
  // Once more after what is saved, which says that they go on.
  saveRunning().then(() => store.tell({ left }));
  store.tell({ left });
});
document.addEventListener("visibilitychange", () => (document.hidden ? saveRunning() : look()));

/** What another tab says: it has saved or removed a conversation, asks who writes, or what it wrote in ends. */
async function otherTab({ saved, removed, asks, stop: stopped, left }) {
  if (asks) saveRunning();
  if (stopped) stop(stopped);
  if (saved) await takeIn(saved);
  for (const id of left ?? []) if (conversations.has(id)) interrupt(conversations.get(id));
  if (left?.includes(current.id)) showAgain();
  if (removed) {
    stop(removed);
    conversations.delete(removed);
    if (removed === current.id) newChat();
  }
  refresh();
}

/** Take in what another tab has saved of a conversation. */
async function takeIn(id) {
  const read = await store.read(id);
  const known = conversations.get(id);
  if (!read || !known) {
    if (read) conversations.set(id, read);
    return;
  }
  const before = known.settings;
  const { added, changed: messages } = merge(known, read, !isRunning(id) && !(known === current && isEditing()));
  if (known !== current) return;
  if (added && !isEditing()) showAgain();
  else messages.forEach(messageChanged);
  if (known.settings !== before && !at("settings").open) fillForm(known.settings);
}

async function start() {
  const kept = await store.open(otherTab);
  at("not-kept").hidden = kept !== null;
  for (const conversation of kept ?? []) {
    interrupt(conversation);
    conversations.set(conversation.id, conversation);
  }
  // What another tab is writing still, it saves now.
  store.tell({ asks: true });
  open(conversations.get(location.hash.slice(1)) ?? current);
  await watchServer(serverChanged);
}

start();
