// Which models the server has, and whether it is ready: asked until it is.

import { health, models, ServerError } from "./api.js";

const AGAIN_MS = 1000;

/** Models and adapters as /v1/models lists them; the first is the model itself. */
export let served = [];

let timer;
let told = () => {};
/** What waits until the server is ready, each told of every look. */
const waiting = new Set();

/**
 * told(trouble) is called with what stands in the way (null: nothing): {text, needsKey, lasts}; lasts says that it does not
 * end by waiting.
 */
export function watchServer(listener) {
  told = listener;
  return look();
}

/** Look now how the server is. */
export async function look() {
  clearTimeout(timer);
  let trouble = null;
  try {
    served = await models();
    const state = await health();
    if (state.status !== "ready") trouble = { text: describe(state), lasts: ["failed", "draining"].includes(state.status) };
  } catch (error) {
    trouble = { text: error.message, needsKey: error.status === 401, lasts: error.status === 401 };
  }
  clearTimeout(timer);
  // A server that wants a key will not change its mind; a new key asks again.
  if (trouble && !trouble.needsKey) timer = setTimeout(look, AGAIN_MS);
  told(trouble);
  for (const one of [...waiting]) one(trouble);
}

/**
 * Wait until the server is ready; step(text) is called with what it does. Raises ServerError if waiting is of no use, and
 * AbortError when signal says so.
 */
export async function untilReady(signal, step) {
  signal.throwIfAborted();
  let looked;
  try {
    await new Promise((resolve, reject) => {
      looked = (trouble) => {
        if (!trouble) resolve();
        else if (trouble.lasts) reject(new ServerError(trouble.text));
        else step(trouble.text);
      };
      waiting.add(looked);
      signal.addEventListener("abort", () => reject(signal.reason), { once: true });
      look();
    });
  } finally {
    waiting.delete(looked);
  }
}

function describe(state) {
  if (state.status === "failed") return `The server could not load the model: ${state.error ?? "see its log"}`;
  if (state.status === "draining") return "The server is shutting down.";
  const step = state.stage ? `: ${state.step}/${state.steps} ${state.stage}, ${Math.round(state.seconds)} s` : "";
  return state.status === "restarting" ? `The engine is being started again${step}…` : `The model is being loaded${step}…`;
}
