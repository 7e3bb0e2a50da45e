// What is done with whole conversations: rename, delete, export, import.

import { stop } from "./answering.js";
import { titleOf } from "./conversation.js";
import { at, toast } from "./dom.js";
import { exportJson, exportMarkdown, importJson } from "./exchange.js";
import { onMenu } from "./sidebar.js";
import * as store from "./store.js";

/** The page: its conversations by id, and keep(conversation), open(conversation), refresh(), removed(conversation). */
let page;

async function removeConversation(id) {
  const conversation = page.conversations.get(id);
  stop(id);
  page.conversations.delete(id);
  await store.remove(id);
  page.removed(conversation);
  toast(`"${titleOf(conversation)}" is deleted.`, {
    label: "Undo",
    run: () => {
      page.conversations.set(id, conversation);
      store.restore(conversation).catch(console.warn);
      page.open(conversation);
    },
  });
}

function renameConversation(id) {
  const conversation = page.conversations.get(id);
  const { name } = at("rename-form").elements;
  name.value = titleOf(conversation);
  at("rename").onclose = () => {
    if (at("rename").returnValue !== "rename") return;
    Object.assign(conversation, { title: name.value.trim(), edited: Date.now() });
    page.keep(conversation);
    page.refresh();
  };
  at("rename").returnValue = "";
  at("rename").showModal();
  name.select();
}

async function importFile(file) {
  try {
    const found = importJson(await file.text());
    for (const conversation of found) {
      page.conversations.set(conversation.id, conversation);
      page.keep(conversation);
    }
    toast(`${found.length} conversation${found.length === 1 ? " was" : "s were"} imported.`);
  } catch (error) {
    toast(error.message);
  }
  page.refresh();
}

/** Have the menu of a conversation and the buttons for all of them work. */
export function startMenu(given) {
  page = given;
  onMenu((action, id) => {
    const conversation = page.conversations.get(id);
    if (action === "rename") renameConversation(id);
    else if (action === "delete") removeConversation(id);
    else if (action === "markdown") exportMarkdown(conversation);
    else exportJson([conversation], titleOf(conversation));
  });
  at("export-all").addEventListener("click", () => exportJson([...page.conversations.values()], "conversations"));
  at("import").addEventListener("click", () => at("import-file").click());
  at("import-file").addEventListener("change", async () => {
    await importFile(at("import-file").files[0]);
    at("import-file").value = "";
  });
}
