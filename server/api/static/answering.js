// Answers under way, each in its own conversation, whichever of them is looked at.

import { streamChat } from "./api.js";
import { add, request } from "./conversation.js";
import { samplingOptions } from "./settings.js";
import { save } from "./store.js";

const SAVE_EVERY_MS = 1000;

/** By a conversation's id: {controller, conversation}. */
const running = new Map();

export const isRunning = (id) => running.has(id);

/** Stop a conversation's answer; what is there of it stays. */
export const stop = (id) => running.get(id)?.controller.abort();

/** Save what has come of all answers: the page may go away. */
export const saveRunning = () => Promise.all([...running.values()].map((run) => save(run.conversation)));

/**
 * Answer the question (a message's id) with model. changed(conversation, message) is called with every change, the last
 * time when the answer has ended; message.state is then "done", "stopped" or "failed" (with message.error).
 */
export async function answer(conversation, question, model, changed) {
  const message = add(conversation, question, { role: "assistant", content: "", reasoning: "", state: "running", model });
  const controller = new AbortController();
  running.set(conversation.id, { controller, conversation });
  changed(conversation, message);
  const started = performance.now();
  let saved = -SAVE_EVERY_MS;
  try {
    const body = { model, messages: request(conversation, question), ...samplingOptions(conversation.settings) };
    for await (const part of streamChat(body, controller.signal)) {
      take(message, part, (performance.now() - started) / 1000);
      if (performance.now() - saved > SAVE_EVERY_MS) {
        saved = performance.now();
        save(conversation).catch(console.warn);
      }
      changed(conversation, message);
    }
    message.state = "done";
  } catch (error) {
    message.state = error.name === "AbortError" ? "stopped" : "failed";
    if (message.state === "failed") Object.assign(message, { error: error.message, status: error.status });
  }
  running.delete(conversation.id);
  if (message.reasoning && message.thoughtFor === undefined) message.thoughtFor = (performance.now() - started) / 1000;
  conversation.updated = Date.now();
  changed(conversation, message);
  return message;
}

function take(message, part, seconds) {
  message.content += part.content;
  message.reasoning += part.reasoning;
  if (part.content || part.reasoning) message.firstAfter ??= seconds;
  if (part.content && message.reasoning) message.thoughtFor ??= seconds;
  for (const name of ["finish", "usage", "timings"]) if (part[name] !== undefined) message[name] = part[name];
}
