// Conversations in the browser's IndexedDB, settings and key in its localStorage. Nothing of it leaves the browser.

// A proxy may have several servers below one address, and the browser keeps one store for all of them.
const NAME = `nf4-chat${new URL(".", location.href).pathname.slice(0, -1)}`;
const CONVERSATIONS = "conversations";
const SETTINGS = `${NAME}.settings`;
const KEY = `${NAME}.key`;

const tabs = new BroadcastChannel(NAME);
let database = null;

const settled = (asked) =>
  new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });

const conversations = (mode) => database.transaction(CONVERSATIONS, mode).objectStore(CONVERSATIONS);

/** All conversations; null where the browser keeps none for this page. changed is told what other tabs did. */
export async function open(changed) {
  tabs.onmessage = (event) => changed(event.data);
  try {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
    database = await settled(asked);
    return await settled(conversations("readonly").getAll());
  } catch (error) {
    console.warn("conversations are not kept:", error);
    return null;
  }
}

/** Keep a conversation as it is now. */
export async function save(conversation) {
  if (!database) return;
  await settled(conversations("readwrite").put(conversation));
  tabs.postMessage({ saved: conversation.id });
}

/** One conversation as another tab has left it. */
export const read = (id) => settled(conversations("readonly").get(id));

export async function remove(id) {
  if (!database) return;
  await settled(conversations("readwrite").delete(id));
  tabs.postMessage({ removed: id });
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
