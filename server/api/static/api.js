// The server's HTTP API, as far as the page needs it. Addresses are relative: the server may be below a path of a proxy.

import { apiKey } from "./store.js";

/** What the server refused, in its own words, or that it was not there (status 0); code is the server's. */
export class ServerError extends Error {
  constructor(message, status = 0, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function headers() {
  const key = apiKey();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { headers: headers(), ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  throw new ServerError(said?.error?.message ?? `The server answered ${answer.status}.`, answer.status, said?.error?.code);
}

/** The model and its adapters, as /v1/models has them. */
export async function models() {
  return (await (await ask("v1/models")).json()).data;
}

/** /health's document, also while the model loads. Raises ServerError when nobody answers. */
export async function health() {
  try {
    return await (await fetch("health")).json();
  } catch {
    throw new ServerError("The server cannot be reached.");
  }
}

/** Whether a model of /v1/models takes images: OpenRouter's field, which says what its input may be. */
export const takesImages = (model) => Boolean(model?.input_modalities?.includes("image"));

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const part = await reader.read();
    if (part.done) return;
    const lines = (held + part.value).split(/\r?\n/);
    held = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

/**
 * Stream a chat completion: yields what each chunk adds, {content, reasoning, finish, usage, timings}.
 * Raises ServerError, and AbortError when signal says so.
 */
export async function* streamChat(body, signal) {
  const whole = { ...body, stream: true, timings: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const answer = await ask("v1/chat/completions", { method: "POST", body: JSON.stringify(whole), signal });
  try {
    for await (const data of events(answer)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message, 500);
      const choice = chunk.choices[0];
      yield {
        content: choice?.delta.content ?? "",
        reasoning: choice?.delta.reasoning_content ?? "",
        finish: choice?.finish_reason ?? undefined,
        usage: chunk.usage ?? undefined,
        timings: choice?.timings ?? undefined,
      };
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServerError) throw error;
    throw new ServerError("The connection to the server broke.");
  }
  throw new ServerError("The connection ended before the answer did.");
}
