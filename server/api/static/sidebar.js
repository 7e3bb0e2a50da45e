// The list of conversations: grouped by day, searched, each with a menu.

import { isRunning } from "./answering.js";
import { match, titleOf } from "./conversation.js";
import { at, element, iconButton } from "./dom.js";

const DAY_MS = 86400000;

function group(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY_MS) return "Yesterday";
  if (time >= today - 6 * DAY_MS) return "Last 7 days";
  return new Date(time).toLocaleDateString(undefined, { month: "long", year: "numeric" });
}

/** Show conversations; current is the id of the one that is open. */
export function showList(conversations, current) {
  const words = at("search").value;
  const items = [];
  let heading = "";
  for (const conversation of [...conversations].sort((a, b) => b.updated - a.updated)) {
    const found = words.trim() ? match(conversation, words) : "";
    if (found === null) continue;
    const name = group(conversation.updated);
    if (name !== heading) items.push(element("li", { class: "heading", text: name }));
    heading = name;
    items.push(item(conversation, current, found));
  }
  if (!items.length) items.push(element("li", { class: "empty", text: words.trim() ? "Nothing found." : "No conversations yet." }));
  const focused = document.activeElement.closest("#conversations a, #conversations button");
  const [id, tag] = [focused?.parentElement.dataset.id, focused?.tagName];
  at("conversations").replaceChildren(...items);
  if (focused) items.find((one) => one.dataset.id === id)?.querySelector(tag).focus();
}

function item(conversation, current, found) {
  const title = titleOf(conversation);
  const open = element(
    "a",
    { href: `#${conversation.id}`, title, "aria-current": conversation.id === current && "page" },
    element("span", { class: "title", text: title }),
    found && element("span", { class: "found", text: found }),
  );
  const menu = iconButton(`Menu of ${title}`, "dots", () => openMenu(menu, conversation.id), { "aria-haspopup": "menu" });
  const classes = ["item", conversation.id === current && "current", isRunning(conversation.id) && "running"];
  return element("li", { class: classes.filter(Boolean).join(" "), "data-id": conversation.id }, open, menu);
}

let menuOf = null;

/** Open the menu of a conversation beside a button. */
export function openMenu(button, id) {
  const menu = at("menu");
  menuOf = id;
  menu.showPopover();
  const { bottom, top, left, right } = button.getBoundingClientRect();
  const under = bottom + menu.offsetHeight + 8 < innerHeight;
  menu.style.top = `${under ? bottom + 4 : top - menu.offsetHeight - 4}px`;
  menu.style.left = `${Math.max(8, Math.min(left, right - menu.offsetWidth + 160, innerWidth - menu.offsetWidth - 8))}px`;
  menu.querySelector("button").focus();
}

/** chosen(action, id) is called when an item of a conversation's menu is chosen. */
export function onMenu(chosen) {
  at("menu").addEventListener("click", (event) => {
    const action = event.target.closest("button")?.dataset.action;
    if (!action) return;
    at("menu").hidePopover();
    chosen(action, menuOf);
  });
  at("menu").addEventListener("keydown", (event) => {
    const buttons = [...at("menu").querySelectorAll("button")];
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    buttons[(buttons.indexOf(document.activeElement) + step + buttons.length) % buttons.length].focus();
  });
}

/** On a phone the list lies over the conversation. */
export function toggleSidebar(open) {
  document.body.classList.toggle("listing", open);
  at("list-button").setAttribute("aria-expanded", String(document.body.classList.contains("listing")));
}
