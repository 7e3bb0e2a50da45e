// Where a message is written: the field, what is attached, Send and Stop.

import { attached, paste, setAttached, startAttachments } from "./attachments.js";
import { at, icon, isSendKey } from "./dom.js";

const field = at("text");

/** sent(draft) is called for a message to send and returns whether it was taken; stopped() for Stop. */
export function startComposer(sent, stopped) {
  const send = () => {
    const written = draft();
    written.text = written.text.trim();
    if (isEmpty(written) || at("composer").dataset.running === "true") return;
    if (sent(written)) setDraft();
  };
  at("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (at("composer").dataset.running === "true") stopped();
    else send();
  });
  field.addEventListener("keydown", (event) => {
    if (!isSendKey(event)) return;
    event.preventDefault();
    send();
  });
  field.addEventListener("input", fit);
  field.addEventListener("paste", paste);
  startAttachments((text) => {
    field.setRangeText(text, field.selectionStart, field.selectionEnd, "end");
    fit();
  });
}

function fit() {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

/** What is written and not sent: {text, images, files}. */
export const draft = () => ({ text: field.value, ...attached() });

/** Whether a draft has nothing in it. */
export const isEmpty = ({ text, images, files }) => !text && !images.length && !files.length;

/** Have a draft in the field; without one it is empty. */
export function setDraft(written = { text: "" }) {
  field.value = written.text;
  setAttached(written);
  fit();
}

/** Whether an answer is under way: Send is then Stop. */
export function setRunning(running) {
  if (at("composer").dataset.running === String(running)) return;
  at("composer").dataset.running = String(running);
  const button = at("send");
  button.replaceChildren(icon(running ? "stop" : "up"));
  button.title = running ? "Stop (Escape)" : "Send (Enter)";
  button.setAttribute("aria-label", running ? "Stop" : "Send");
}
