// Conversations as files: JSON, which can be taken in again, and Markdown to read.

import { fileText, newId, path, titleOf } from "./conversation.js";
import { download } from "./dom.js";

const FORMAT = "nf4-chat";

const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60).toLowerCase() || "chat";

/** Save conversations as one JSON file. */
export function exportJson(conversations, name) {
  const document = { format: FORMAT, version: 1, exported: new Date().toISOString(), conversations };
  download(`${fileName(name)}.json`, "application/json", JSON.stringify(document, null, 2));
}

/** Save the branch that is shown as Markdown. */
export function exportMarkdown(conversation) {
  const title = titleOf(conversation);
  const parts = [`# ${title}`, `*${new Date(conversation.created).toLocaleString()}*`];
  if (conversation.settings.system) parts.push("## System", conversation.settings.system);
  for (const message of path(conversation)) {
    parts.push(message.role === "user" ? "## You" : `## ${message.model ?? "Answer"}`);
    if (message.images?.length) parts.push(`*(${message.images.length} image${message.images.length > 1 ? "s" : ""})*`);
    for (const file of message.files ?? []) parts.push(fileText(file));
    if (message.reasoning) parts.push(`<details><summary>Thoughts</summary>\n\n${message.reasoning.trim()}\n\n</details>`);
    if (message.content) parts.push(message.content.trim());
    if (message.error) parts.push(`*${message.error}*`);
  }
  download(`${fileName(title)}.md`, "text/markdown", `${parts.join("\n\n")}\n`);
}

/** The conversations of an exported JSON file, under new names. Raises Error for what is no such file. */
export function importJson(text) {
  let document;
  try {
    document = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (document?.format !== FORMAT || !Array.isArray(document.conversations))
    throw new Error("This file is no export of this page.");
  return document.conversations.map(conversation);
}

function conversation(given) {
  const messages = (given.messages ?? []).map(message);
  const known = new Set([null]);
  for (let before = 0; known.size > before; ) {
    before = known.size;
    for (const { id, parent } of messages) if (known.has(parent)) known.add(id);
  }
  if (messages.some((one) => !known.has(one.id))) throw new Error("A message of this file belongs nowhere.");
  return {
    id: newId(),
    title: String(given.title ?? ""),
    created: Number(given.created) || Date.now(),
    updated: Number(given.updated) || Date.now(),
    settings: typeof given.settings === "object" && given.settings ? given.settings : {},
    messages,
    leaf: messages.some((one) => one.id === given.leaf) ? given.leaf : (messages.at(-1)?.id ?? null),
  };
}

function message(given) {
  if (!["user", "assistant"].includes(given?.role)) throw new Error("A message of this file has no role that is known.");
  const images = (given.images ?? []).filter((src) => String(src).startsWith("data:image/"));
  const files = (given.files ?? []).map(({ name, text }) => ({ name: String(name), text: String(text) }));
  const state = given.state === "running" ? "interrupted" : given.state;
  return { ...given, state, id: String(given.id), parent: given.parent ?? null, content: String(given.content ?? ""), images, files };
}
