// Small helpers around the document: elements, icons, notices, the clipboard.

export const at = (id) => document.getElementById(id);

/** An element with properties (class, text, attributes as they are named in HTML, listeners as functions) and children. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === false) continue;
    if (name === "text") made.textContent = value;
    else if (typeof value === "function") made.addEventListener(name, value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child));
  return made;
}

/** One of the drawings that chat.html defines. */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const drawing = document.createElementNS(space, "svg");
  drawing.setAttribute("class", "icon");
  drawing.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(space, "use");
  use.setAttribute("href", `#icon-${name}`);
  drawing.append(use);
  return drawing;
}

/** A button with a drawing only; its label is for screen readers and the pointer. */
export function iconButton(label, drawing, click, properties = {}) {
  return element("button", { type: "button", class: "quiet", title: label, "aria-label": label, click, ...properties }, icon(drawing));
}

/**
 * Whether a key in a field of several lines sends it: Enter, but with Shift. On a phone, where there is no Shift, Enter
 * begins a line; with Control or Command it always sends.
 */
export function isSendKey(event) {
  if (event.key !== "Enter" || event.isComposing) return false;
  return event.ctrlKey || event.metaKey || !(event.shiftKey || matchMedia("(pointer: coarse)").matches);
}

let hiding;

/** A notice at the lower edge; action is {label, run}. */
export function toast(text, action) {
  const place = at("toast");
  clearTimeout(hiding);
  place.replaceChildren(element("span", { text }));
  if (action)
    place.append(
      element("button", {
        type: "button",
        text: action.label,
        click: () => {
          place.hidden = true;
          action.run();
        },
      }),
    );
  place.hidden = false;
  hiding = setTimeout(() => (place.hidden = true), action ? 10000 : 3000);
}

/** Say something to screen readers alone; fresh forgets what was said before. */
export function announce(text, fresh = false) {
  if (fresh) at("announcer").replaceChildren();
  at("announcer").append(element("p", { text }));
}

/** Text into the clipboard. Browsers offer their interface to pages from https and this machine only. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const holder = element("textarea", { class: "unseen", readonly: true });
    holder.value = text;
    document.body.append(holder);
    holder.select();
    document.execCommand("copy");
    holder.remove();
  }
}

/** Copy, and show for a moment on the button that it happened. */
export async function copyFrom(button, text) {
  await copy(text);
  const before = [...button.childNodes];
  button.replaceChildren(icon("check"), ...before.filter((node) => node.nodeType === Node.TEXT_NODE));
  button.classList.add("done");
  setTimeout(() => {
    button.replaceChildren(...before);
    button.classList.remove("done");
  }, 1500);
}

/** Have the browser save a text as a file. */
export function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}
