// Which models the server has, and whether it is ready: asked until it is.

import { health, models } from "./api.js";

const AGAIN_MS = 1500;

/** Models and adapters as /v1/models lists them; the first is the model itself. */
export let served = [];

let timer;
let told = () => {};

/** told(trouble) is called with what stands in the way (null: nothing): {text, needsKey}. */
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
    if (state.status !== "ready") trouble = { text: describe(state) };
  } catch (error) {
    trouble = { text: error.message, needsKey: error.status === 401 };
  }
  // A server that wants a key will not change its mind; a new key asks again.
  if (trouble && !trouble.needsKey) timer = setTimeout(look, AGAIN_MS);
  told(trouble);
}

function describe(state) {
  if (state.status === "failed") return `The server could not load the model: ${state.error ?? "see its log"}`;
  if (state.status === "draining") return "The server is shutting down.";
  const step = state.stage ? `: ${state.step}/${state.steps} ${state.stage}, ${Math.round(state.seconds)} s` : "";
  return `The model is being loaded${step}…`;
}
