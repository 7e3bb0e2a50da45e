// Where a message is written: the field, images where the model takes them, Send and Stop.

import { at, element, icon, iconButton, isSendKey, toast } from "./dom.js";

const LARGEST_IMAGE = 8 << 20;

const field = at("text");
let images = [];
let imagesTaken = false;

/** sent(text, images) is called for a message to send and returns whether it was taken; stopped() for Stop. */
export function startComposer(sent, stopped) {
  const send = () => {
    const text = field.value.trim();
    if ((!text && !images.length) || at("composer").dataset.running === "true") return;
    if (sent(text, images)) setDraft("");
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
  field.addEventListener("paste", (event) => attach(event.clipboardData.files, event));
  at("composer").addEventListener("dragover", (event) => imagesTaken && event.preventDefault());
  at("composer").addEventListener("drop", (event) => attach(event.dataTransfer.files, event));
  at("attach").addEventListener("click", () => at("files").click());
  at("files").addEventListener("change", () => {
    attach(at("files").files);
    at("files").value = "";
  });
}

function fit() {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

/** What is written and not sent. */
export const draft = () => field.value;

/** Put a text into the field; the images go. */
export function setDraft(text) {
  field.value = text;
  images = [];
  showImages();
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

/** Whether the chosen model takes images. */
export function setTakesImages(taken) {
  imagesTaken = taken;
  at("attach").hidden = !taken;
  if (!taken && images.length) {
    images = [];
    showImages();
  }
}

function attach(files, event) {
  if (!imagesTaken) return;
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    event?.preventDefault();
    if (file.size > LARGEST_IMAGE) toast(`${file.name} is larger than ${LARGEST_IMAGE >> 20} MiB.`);
    else {
      const reader = new FileReader();
      reader.onload = () => {
        images.push(reader.result);
        showImages();
      };
      reader.readAsDataURL(file);
    }
  }
}

function showImages() {
  at("attached").replaceChildren(
    ...images.map((src, i) => {
      const remove = iconButton("Remove image", "close", () => {
        images.splice(i, 1);
        showImages();
      });
      return element("div", {}, element("img", { src, alt: `image ${i + 1}` }), remove);
    }),
  );
}
