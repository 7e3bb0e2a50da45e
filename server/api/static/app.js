// The chat page: puts store, server, list, composer and conversation together.

import { answer, isRunning, saveRunning, stop } from "./answering.js";
import { takesImages } from "./api.js";
import { draft, setDraft, setRunning, setTakesImages, startComposer } from "./composer.js";
import { add, newConversation, path, showVersion, titleOf } from "./conversation.js";
import { announce, at, element, toast } from "./dom.js";
import { exportJson, exportMarkdown, importJson } from "./exchange.js";
import { look, served, watchServer } from "./server.js";
import { checkForm, fillForm, readForm } from "./settings.js";
import { onMenu, openMenu, showList, toggleSidebar } from "./sidebar.js";
import * as store from "./store.js";
import { actions, edit, followAgain, messageChanged, showConversation } from "./view.js";

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
    setDraft(drafts.get(current.id) ?? "");
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
  setRunning(isRunning(current.id));
  showModels();
}

const keep = (conversation) =>
  store.save(conversation).catch((error) => toast(`This conversation could not be kept: ${error.message}`));

// --- models

const chosenModel = () => served.find((one) => one.id === current.settings.model) ?? served[0];

function showModels() {
  const option = (one) => element("option", { value: one.id, text: one.id });
  const adapters = served.filter((one) => one.parent);
  const options = served.filter((one) => !one.parent).map(option);
  if (adapters.length) options.push(element("optgroup", { label: "Adapters" }, ...adapters.map(option)));
  const model = chosenModel();
  const select = at("model");
  const now = JSON.stringify(served.map((one) => [one.id, one.parent]));
  if (select.dataset.options !== now) select.replaceChildren(...options);
  select.dataset.options = now;
  select.disabled = !model;
  if (model) select.value = model.id;
  at("welcome-model").textContent = model?.id ?? "NF4 server";
  const length = model?.max_model_len;
  at("welcome-about").textContent = length ? `${model.parent ? `An adapter of ${model.parent}` : "Served in 4-bit NF4"} · ${length.toLocaleString("en")} tokens of context` : "";
  setTakesImages(takesImages(model));
}

function serverChanged(trouble) {
  const place = at("status");
  place.hidden = !trouble;
  if (trouble) place.firstElementChild.textContent = trouble.needsKey && !store.apiKey() ? "This server wants an API key." : trouble.text;
  at("enter-key").hidden = !trouble?.needsKey;
  refresh();
}

// --- sending and answering

function changed(conversation, message) {
  if (conversation === current) messageChanged(message);
  if (message.state === "running" && message.content) return;
  // It begins, or it has ended.
  refresh();
  if (message.state !== "running") announce(message.error ?? `The answer is ${message.state === "stopped" ? "stopped" : "complete"}.`);
}

async function ask(conversation, question) {
  const model = chosenModel();
  if (!model) await look();
  announce("The model is answering.", true);
  await answer(conversation, question, (model ?? chosenModel())?.id ?? "", changed);
  // Deleted meanwhile, it stays deleted.
  if (conversations.has(conversation.id)) await keep(conversation);
}

function send(text, images) {
  if (!checkForm()) return false;
  if (isRunning(current.id)) return false;
  const isNew = !conversations.has(current.id);
  conversations.set(current.id, current);
  const question = add(current, current.leaf, { role: "user", content: text, images: [...images] });
  if (isNew) history.pushState(null, "", `#${current.id}`);
  messageChanged(question);
  followAgain();
  keep(current);
  ask(current, question.id);
  return true;
}

function branchOff(change) {
  if (isRunning(current.id)) {
    toast("An answer is under way; stop it first.");
    return;
  }
  const question = change();
  // The answer to come takes the place of the one that was there.
  if (question) current.leaf = question;
  showConversation(current);
  refresh();
  keep(current);
  if (question) ask(current, question);
}

actions.regenerate = (message) => checkForm() && branchOff(() => message.parent);
actions.retry = (message) =>
  branchOff(() => {
    // A failed answer without a text is nothing to keep.
    if (!message.content) current.messages = current.messages.filter((one) => one !== message);
    return message.parent;
  });
actions.showVersion = (message) => branchOff(() => void showVersion(current, message));
actions.edit = (message, text) =>
  branchOff(() => {
    const { role, images, model } = message;
    if (role === "user") return add(current, message.parent, { role, images, content: text }).id;
    add(current, message.parent, { role, model, content: text, state: "edited" });
    return undefined;
  });

// --- a conversation's menu

async function removeConversation(id) {
  const conversation = conversations.get(id);
  stop(id);
  conversations.delete(id);
  await store.remove(id);
  if (conversation === current) newChat();
  else refresh();
  toast(`"${titleOf(conversation)}" is deleted.`, {
    label: "Undo",
    run: () => {
      conversations.set(id, conversation);
      keep(conversation);
      open(conversation);
    },
  });
}

function renameConversation(id) {
  const conversation = conversations.get(id);
  const { name } = at("rename-form").elements;
  name.value = titleOf(conversation);
  at("rename").onclose = () => {
    if (at("rename").returnValue !== "rename") return;
    conversation.title = name.value.trim();
    keep(conversation);
    refresh();
  };
  at("rename").returnValue = "";
  at("rename").showModal();
  name.select();
}

onMenu((action, id) => {
  const conversation = conversations.get(id);
  if (action === "rename") renameConversation(id);
  else if (action === "delete") removeConversation(id);
  else if (action === "markdown") exportMarkdown(conversation);
  else exportJson([conversation], titleOf(conversation));
});

// --- everything that is clicked, typed or happens

startComposer(send, () => stop(current.id));
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
    setDraft(example.textContent);
    at("text").focus();
  });

function settingsChanged(more = {}) {
  current.settings = { ...readForm(), model: current.settings.model, ...more };
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
at("export-all").addEventListener("click", () => exportJson([...conversations.values()], "conversations"));
at("import").addEventListener("click", () => at("import-file").click());
at("import-file").addEventListener("change", async () => {
  try {
    const found = importJson(await at("import-file").files[0].text());
    for (const conversation of found) {
      conversations.set(conversation.id, conversation);
      keep(conversation);
    }
    toast(`${found.length} conversation${found.length === 1 ? " was" : "s were"} imported.`);
  } catch (error) {
    toast(error.message);
  }
  at("import-file").value = "";
  refresh();
});

document.addEventListener("keydown", (event) => {
  if (event.isComposing || document.querySelector("dialog[open], :popover-open")) return;
  const command = event.ctrlKey || event.metaKey;
  if (event.key === "Escape") {
    if (document.body.classList.contains("listing")) toggleSidebar(false);
    else stop(current.id);
  } else if (command && event.shiftKey && event.key.toLowerCase() === "o") newChat();
  else if (command && event.key.toLowerCase() === "k") {
    toggleSidebar(true);
    at("search").focus();
  } else if (event.key === "ArrowUp" && event.target === at("text") && !draft()) {
    const last = path(current).findLast((message) => message.role === "user");
    if (!last || isRunning(current.id)) return;
    edit(last);
  } else return;
  event.preventDefault();
});
addEventListener("popstate", openFromAddress);
addEventListener("pagehide", saveRunning);
document.addEventListener("visibilitychange", () => (document.hidden ? saveRunning() : look()));

async function otherTab({ saved, removed }) {
  if (removed) conversations.delete(removed);
  else if (!isRunning(saved)) {
    const read = await store.read(saved);
    if (read) conversations.set(saved, read);
  }
  const now = conversations.get(current.id);
  if (now && now !== current) {
    current = now;
    showConversation(current);
  } else if (removed === current.id) newChat();
  refresh();
}

async function start() {
  const kept = await store.open(otherTab);
  at("not-kept").hidden = kept !== null;
  for (const conversation of kept ?? []) {
    for (const message of conversation.messages) if (message.state === "running") message.state = "interrupted";
    conversations.set(conversation.id, conversation);
  }
  open(conversations.get(location.hash.slice(1)) ?? current);
  await watchServer(serverChanged);
}

start();
