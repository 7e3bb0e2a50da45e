// A conversation: a tree of messages, as an edited or regenerated one stands beside what was there before.
//
// {id, title, created, updated, settings, messages: [{id, parent, role, content, ...}], leaf}; leaf is the last message
// of the branch that is shown, parent is null for a first message. Content is a text; images are data: addresses, files
// {name, text}.

/** A new name; crypto.randomUUID is missing on pages that come over plain http. */
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation(settings) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, settings: { ...settings }, messages: [], leaf: null };
}

const find = (conversation, id) => conversation.messages.find((message) => message.id === id);

/** Put a message behind parent (an id or null), and show its branch. */
export function add(conversation, parent, message) {
  const added = { id: newId(), parent, created: Date.now(), ...message };
  conversation.messages.push(added);
  conversation.leaf = added.id;
  conversation.updated = added.created;
  return added;
}

/** Take a message out, for other tabs, too. */
export function removeMessage(conversation, message) {
  conversation.messages = conversation.messages.filter((one) => one !== message);
  conversation.removed = [...(conversation.removed ?? []), message.id];
}

/** The branch that is shown, from its first message on. */
export function path(conversation, leaf = conversation.leaf) {
  const found = [];
  for (let message = find(conversation, leaf); message; message = find(conversation, message.parent)) found.push(message);
  return found.reverse();
}

/** The message and those that stand in its place in other branches, oldest first. */
export function versions(conversation, message) {
  return conversation.messages.filter((one) => one.parent === message.parent && one.role === message.role);
}

/** Show the branch through a message, down to its newest end. */
export function showVersion(conversation, message) {
  let last = message;
  for (;;) {
    const next = conversation.messages.findLast((one) => one.parent === last.id);
    if (!next) break;
    last = next;
  }
  conversation.leaf = last.id;
}

/** Whether an answer can go on where it ends: the last one that is shown, if it was cut or stopped. */
export function canContinue(conversation, message) {
  if (message.id !== conversation.leaf || message.role !== "assistant" || !message.content) return false;
  return ["stopped", "interrupted", "failed", "edited"].includes(message.state) || message.finish === "length";
}

/**
 * What the server is asked: the branch that ends in a message. Questions that were never answered are left out, and so are
 * thoughts, but for those of an answer that is to go on.
 */
export function request(conversation, last) {
  const branch = path(conversation, last);
  const asked = [];
  const system = conversation.settings.system?.trim();
  if (system) asked.push({ role: "system", content: system });
  branch.forEach((message, i) => {
    const answer = message.role === "user" ? branch[i + 1] : message;
    if (answer && !answer.content) return;
    const goesOn = message.id === last && message.role === "assistant" && message.reasoning;
    asked.push({ role: message.role, content: content(message), ...(goesOn ? { reasoning_content: message.reasoning } : {}) });
  });
  return asked;
}

function content(message) {
  const text = [...(message.files ?? []).map(fileText), message.content].filter((part) => part).join("\n\n");
  if (!message.images?.length) return text;
  const images = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return [...images, { type: "text", text }];
}

/** A text file as Markdown, in a fence that it does not end itself. */
export function fileText({ name, text }) {
  const longest = (text.match(/`{3,}/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** Its title, or the beginning of its first message. */
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const lines = conversation.messages[0]?.content.slice(0, 2000).split("\n") ?? [];
  const first = lines.map((line) => withoutMarkdown(line.slice(0, 200))).find((line) => line) ?? conversation.messages[0]?.files?.[0]?.name ?? "";
  return first.length > 60 ? `${first.slice(0, 59).trimEnd()}…` : first || "New chat";
}

const LINE_MARKS = /^(?:#{1,6}\s+|>\s*|[-*+]\s+|\d+[.)]\s+)+|^(?:`{3,}|~{3,}).*$|^[-=*_|:\s]+$/;
// Marks inside of words are none: 2*3*4, __init__.
const PAIRS = /(?<![\w*_])(\*\*|__|\*|_(?=[^_]*\s)|~~|`+)(?=\S)(.+?)(?<=\S)\1(?![\w*_])/g;

/** A line of Markdown as plain text; "" if it is nothing but marks. */
function withoutMarkdown(line) {
  const bare = line.trim().replace(LINE_MARKS, "").replace(/!?\[([^\]]*)\]\([^)\s]*\)/g, "$1");
  const text = bare.replace(PAIRS, (whole, mark, inner) => (mark === "__" && !/\s/.test(inner) ? whole : inner));
  return text === bare ? text.trim() : withoutMarkdown(text);
}

/** Where the words stand in a conversation: null, or the text around them ("" for its title). */
export function match(conversation, words) {
  const wanted = words.trim().toLowerCase();
  if (titleOf(conversation).toLowerCase().includes(wanted)) return "";
  for (const message of conversation.messages) {
    const text = [message.content, ...(message.files ?? []).map((file) => file.name)].join("\n");
    const place = text.toLowerCase().indexOf(wanted);
    if (place < 0) continue;
    const start = Math.max(0, place - 24);
    return `${start ? "…" : ""}${text.slice(start, place + wanted.length + 40)}`.replace(/\s+/g, " ");
  }
  return null;
}
