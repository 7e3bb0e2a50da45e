// Answers under way, each in its own conversation, whichever of them is looked at.

import { streamChat } from "./api.js";
import { add, request } from "./conversation.js";
import { untilReady } from "./server.js";
import { samplingOptions } from "./settings.js";
import { save } from "./store.js";

const SAVE_EVERY_MS = 1000;
/** How soon a refused request is not sent again: API processes do not become ready at once. */
const REFUSED_MS = 300;
/** What the server says while it will soon be able to answer. */
const NOT_YET = ["model_loading", "engine_restarting"];

/** By a conversation's id: {controller, conversation, message}. */
const running = new Map();

export const isRunning = (id) => running.has(id);

/** Stop a conversation's answer; what is there of it stays. */
export const stop = (id) => running.get(id)?.controller.abort();

/** Save what has come of all answers, so that it is there if the page goes away, and for other tabs. */
export const saveRunning = () => Promise.all([...running.values()].map(saveRun));

/** Names of the conversations in which answers come here. */
export const runningHere = () => [...running.keys()];

function saveRun({ conversation, message }) {
  message.beat = Date.now();
  return save(conversation);
}

/**
 * Answer the question (a message's id) with model. changed(conversation, message) is called with every change, the last
 * time when the answer has ended; message.state is then "done", "stopped" or "failed" (with message.error). While the
 * server cannot answer yet, message.waiting says why.
 */
export function answer(conversation, question, model, changed) {
  const message = add(conversation, question, { role: "assistant", content: "", reasoning: "", state: "running", model });
  return run(conversation, message, { model, messages: request(conversation, question) }, changed);
}

/** Go on with an answer that was cut or stopped, where it ends; as answer(). */
export function resume(conversation, message, model, changed) {
  const asked = { model, messages: request(conversation, message.id), continue_final_message: true, add_generation_prompt: false };
  // Of an answer in parts, the tokens of those that are there.
  const earlier = (message.earlier ?? 0) + (message.usage?.completion_tokens ?? 0);
  for (const name of ["error", "status", "finish", "usage", "timings"]) delete message[name];
  Object.assign(message, { state: "running", turn: (message.turn ?? 0) + 1, earlier, model });
  return run(conversation, message, asked, changed);
}

async function run(conversation, message, asked, changed) {
  const controller = new AbortController();
  const { turn } = message;
  const begun = { conversation, message, controller };
  running.set(conversation.id, begun);
  saveRun(begun).catch(console.warn);
  changed(conversation, message);
  const started = performance.now();
  let saved = started;
  try {
    const body = { ...asked, ...samplingOptions(conversation.settings) };
    for await (const part of streamWhenReady(body, controller.signal, (step) => changed(conversation, Object.assign(message, { waiting: step })))) {
      // Another tab has gone on with it, as this one was thought to be gone.
      if (message.turn !== turn) {
        controller.abort();
        break;
      }
      take(begun, part, (performance.now() - started) / 1000);
      if (performance.now() - saved > SAVE_EVERY_MS) {
        saved = performance.now();
        saveRun(begun).catch(console.warn);
      }
      changed(conversation, message);
    }
    if (message.turn === turn) message.state = "done";
  } catch (error) {
    message.state = error.name === "AbortError" ? "stopped" : "failed";
    if (message.state === "failed") Object.assign(message, { error: error.message, status: error.status });
  }
  running.delete(conversation.id);
  for (const name of ["waiting", "rate", "beat"]) delete message[name];
  if (message.reasoning && message.thoughtFor === undefined) message.thoughtFor = (performance.now() - started) / 1000;
  conversation.updated = Date.now();
  changed(conversation, message);
  return message;
}

/** streamChat() as soon as the server can answer; step(text) is called with what it does until then. */
async function* streamWhenReady(body, signal, step) {
  for (;;) {
    try {
      yield* streamChat(body, signal);
      return;
    } catch (error) {
      if (!NOT_YET.includes(error.code)) throw error;
      await Promise.all([untilReady(signal, step), new Promise((resolve) => setTimeout(resolve, REFUSED_MS))]);
    }
  }
}

function take(begun, part, seconds) {
  const { message } = begun;
  delete message.waiting;
  message.content += part.content;
  message.reasoning += part.reasoning;
  for (const name of ["finish", "usage", "timings"]) if (part[name] !== undefined) message[name] = part[name];
  if (!part.content && !part.reasoning) return;
  message.firstAfter ??= seconds;
  if (part.content && message.reasoning) message.thoughtFor ??= seconds;
  const tokens = message.usage?.completion_tokens ?? 0;
  begun.first ??= { tokens, seconds };
  // The first tokens come together, and say nothing of the rest.
  if (seconds > begun.first.seconds + 0.3) message.rate = (tokens - begun.first.tokens) / (seconds - begun.first.seconds);
}
