// What goes with a message: images where the model takes them, text files, and long pastes. Other files are refused in words.

import { announce, at, element, icon, iconButton, toast } from "./dom.js";

const MAX_IMAGE = 8 << 20;
const MAX_TEXT = 1 << 20;
const LONG_PASTE = 3000;

let images = [];
/** {name, text, pasted}; pasted is whether it came from the clipboard. */
let files = [];
let imagesTaken = false;
let putBack = () => {};

/** What is attached: {images: data: addresses, files: [{name, text}]}. */
export const attached = () => ({ images: [...images], files: files.map(({ name, text }) => ({ name, text })) });

/** Have these attached, and nothing else. */
export function setAttached(given = {}) {
  images = [...(given.images ?? [])];
  files = [...(given.files ?? [])];
  showAttached();
}

/** Whether the chosen model takes images. */
export function setTakesImages(taken) {
  imagesTaken = taken;
  const label = taken ? "Attach images and text files" : "Attach text files";
  at("attach").title = label;
  at("attach").setAttribute("aria-label", label);
  if (taken || !images.length) return;
  images = [];
  showAttached();
}

/** Take files that are chosen, dropped or pasted; insert(text) puts a paste into the message after all. */
export function startAttachments(insert) {
  putBack = insert;
  at("attach").addEventListener("click", () => at("files").click());
  at("files").addEventListener("change", async () => {
    await attach([...at("files").files]);
    at("files").value = "";
  });
  document.addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    attach([...event.dataTransfer.files]);
  });
}

/** Take a paste, if it is of files or long. */
export function paste(event) {
  const text = event.clipboardData.getData("text/plain");
  // Where there are both, the files are pictures of the text.
  if (text ? text.length <= LONG_PASTE : !event.clipboardData.files.length) return;
  event.preventDefault();
  if (!text) attach([...event.clipboardData.files]);
  else addFile({ name: files.some((one) => one.pasted) ? `Pasted text ${files.length + 1}` : "Pasted text", text, pasted: true });
}

async function attach(given) {
  for (const file of given) {
    const reason = await (file.type.startsWith("image/") && file.type !== "image/svg+xml" ? attachImage(file) : attachText(file));
    if (reason) toast(reason);
  }
}

async function attachImage(file) {
  if (!imagesTaken) return `${file.name} cannot be attached: this model takes no images.`;
  if (file.size > MAX_IMAGE) return `${file.name} is larger than ${MAX_IMAGE >> 20} MiB.`;
  const reader = new FileReader();
  await new Promise((resolve) => {
    reader.onload = reader.onerror = resolve;
    reader.readAsDataURL(file);
  });
  if (reader.error) return `${file.name} cannot be read.`;
  images.push(reader.result);
  showAttached();
  announce(`${file.name} is attached.`);
  return "";
}

async function attachText(file) {
  if (/\.pdf$/i.test(file.name)) return `${file.name} cannot be attached: PDF files are not read here. Copy their text and paste it.`;
  if (file.size > MAX_TEXT) return `${file.name} is larger than ${MAX_TEXT >> 20} MiB.`;
  const text = await file.arrayBuffer().then(decode).catch(() => null);
  if (text === null) return `${file.name} cannot be attached: it is no text file.`;
  addFile({ name: file.name, text });
  return "";
}

/** Text of a file's bytes. Raises TypeError where they are none. */
function decode(bytes) {
  const [first, second] = new Uint8Array(bytes);
  const wide = { 0xfffe: "utf-16le", 0xfeff: "utf-16be" }[(first << 8) | second];
  const text = new TextDecoder(wide ?? "utf-8", { fatal: true }).decode(bytes);
  if (text.includes("\0")) throw new TypeError("a text has no zeros");
  return text;
}

function addFile(file) {
  files.push(file);
  showAttached();
  announce(`${file.name} is attached.`);
}

/** How long a file is, in words. */
export function sizeOf({ text }) {
  const lines = text.replace(/\n$/, "").split("\n").length;
  const length = text.length < 1000 ? `${text.length} characters` : `${(text.length / 1000).toFixed(1)}k characters`;
  return `${lines} line${lines === 1 ? "" : "s"}, ${length}`;
}

function showAttached() {
  const without = (list, one) => () => {
    list.splice(list.indexOf(one), 1);
    showAttached();
    at("text").focus();
  };
  const pictures = images.map((src, i) =>
    element("div", { class: "picture" }, element("img", { src, alt: `image ${i + 1}` }), iconButton("Remove image", "close", without(images, src))),
  );
  const texts = files.map((file) => {
    const remove = without(files, file);
    const insert = () => {
      remove();
      putBack(file.text);
    };
    return element(
      "div",
      { class: "file" },
      icon("file"),
      element("span", { class: "name", text: file.name }),
      element("small", { text: sizeOf(file) }),
      file.pasted && iconButton("Put into the message", "edit", insert),
      iconButton(`Remove ${file.name}`, "close", remove),
    );
  });
  at("attached").replaceChildren(...pictures, ...texts);
}
