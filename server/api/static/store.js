// Conversations in the browser's IndexedDB, settings and key in its localStorage. Nothing of it leaves the browser.

import { merge } from "./merge.js";

// A proxy may have several servers below one address, and the browser keeps one store for all of them.
const NAME = `nf4-chat${new URL(".", location.href).pathname.slice(0, -1)}`;
const CONVERSATIONS = "conversations";
const SETTINGS = `${NAME}.settings`;
const KEY = `${NAME}.key`;

const tabs = new BroadcastChannel(NAME);
/** Conversations that are removed; a tab in which an answer still comes does not bring them back. */
const gone = new Set();
/** Conversations that the browser kept when this tab looked last: what it keeps no more, another tab has removed. */
const known = new Set();
let database = null;

const settled = (asked) =>
  new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });

const conversations = (mode) => database.transaction(CONVERSATIONS, mode).objectStore(CONVERSATIONS);

/**
 * All conversations; null where the browser keeps none for this page. told is called with what other tabs say: {saved} and
 * {removed} with a conversation's id, or what tell() sent.
 */
export async function open(told) {
  // One after the other, as they were said.
  let before = Promise.resolve();
  tabs.onmessage = ({ data }) => {
    if (data.removed) gone.add(data.removed);
    before = before.then(() => told(data)).catch(console.warn);
  };
  try {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
    database = await settled(asked);
    const kept = await settled(conversations("readonly").getAll());
    for (const { id } of kept) known.add(id);
    return kept;
  } catch (error) {
    console.warn("conversations are not kept:", error);
    return null;
  }
}

/** Say something to the other tabs. */
export const tell = (what) => tabs.postMessage(what);

/** Keep a conversation as it is now, with what other tabs have kept of it. */
export async function save(conversation) {
  if (!database || gone.has(conversation.id)) return;
  const whole = { ...conversation, messages: conversation.messages.map((message) => ({ ...message })) };
  const place = conversations("readwrite");
  const kept = await settled(place.get(conversation.id));
  if (kept) merge(whole, kept);
  // What another tab says of it is on its way.
  else if (known.has(conversation.id)) return;
  await settled(place.put(whole));
  known.add(conversation.id);
  tell({ saved: conversation.id });
}

/** One conversation as another tab has left it; undefined if it is removed. */
export async function read(id) {
  const found = await settled(conversations("readonly").get(id));
  if (found) {
    gone.delete(id);
    known.add(id);
  }
  return found;
}

export async function remove(id) {
  gone.add(id);
  known.delete(id);
  if (!database) return;
  await settled(conversations("readwrite").delete(id));
  tell({ removed: id });
}

/** Keep a conversation that was removed. */
export function restore(conversation) {
  gone.delete(conversation.id);
  return save(conversation);
}

function recall(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function remember(name, value) {
  try {
    if (value) localStorage.setItem(name, value);
    else localStorage.removeItem(name);
  } catch (error) {
    console.warn(`${name} is not kept:`, error);
  }
}

/** Settings that new conversations begin with. */
export function lastSettings() {
  try {
    return JSON.parse(recall(SETTINGS)) ?? {};
  } catch {
    return {};
  }
}

export const keepSettings = (settings) => remember(SETTINGS, JSON.stringify(settings));

export const apiKey = () => recall(KEY) ?? "";

export const keepApiKey = (key) => remember(KEY, key);
