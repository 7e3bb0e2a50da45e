// The form in which a message is changed, in its place.

import { element, isSendKey } from "./dom.js";

/** A form with the message's text; close() is called if nothing is to change, changed(text) otherwise. */
export function editForm(message, close, changed) {
  const rows = Math.min(16, message.content.split("\n").length + 1);
  const text = element("textarea", { "aria-label": "Edit message", rows: String(rows) });
  text.value = message.content;
  const submit = (event) => {
    event.preventDefault();
    if (!text.value.trim() && !message.files?.length) return;
    if (text.value === message.content && message.role === "assistant") close();
    else changed(text.value);
  };
  const keydown = (event) => {
    if (event.key === "Escape") close();
    else if (isSendKey(event)) form.requestSubmit();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const label = message.role === "user" ? "Send" : "Save";
  const cancel = element("button", { type: "button", class: "plain", text: "Cancel", title: "Cancel (Escape)", click: close });
  const send = element("button", { type: "submit", class: "main", text: label, title: `${label} (Enter)` });
  const form = element("form", { class: "edit", submit, keydown }, text, element("div", { class: "row" }, cancel, send));
  return form;
}
