// The line under an answer: how it ended, how fast it was, what dequantization took of it.

import { element } from "./dom.js";

const ENDS = {
  stop: ["finished", "finish_reason: stop"],
  length: ["cut at the token limit", "finish_reason: length"],
  tool_calls: ["tool call", "finish_reason: tool_calls"],
};

const seconds = (value) => (value < 0.9995 ? `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(1)} s`);

/** How many tokens an answer has, those from before it went on included. */
const count = (message) => `${(message.earlier ?? 0) + message.usage.completion_tokens} tokens`;

/** What a branch takes of a model's context, as far as it was asked for: {share, text}, or null where nothing is known. */
export function contextUsed(branch, length) {
  const usage = branch.findLast((message) => message.usage)?.usage;
  if (!usage || !length) return null;
  const tokens = usage.prompt_tokens + usage.completion_tokens;
  return { share: tokens / length, text: `${tokens.toLocaleString("en")} of ${length.toLocaleString("en")} tokens of context used` };
}

/** The line for a message: while it comes, what there is of it and how fast it comes. */
export function figures(message) {
  const line = element("div", { class: "figures" });
  const put = (text, title, kind) => line.append(element("span", { text, title, class: kind }));
  if (message.state === "running") {
    if (message.usage) put(count(message), "So far");
    if (message.rate) put(`${message.rate.toFixed(1)} tokens/s`, "From the first token on, as this page sees it");
    return line;
  }
  if (message.state === "stopped") put("stopped", "You stopped this answer", "end");
  else if (message.state === "interrupted") put("interrupted", "The page was closed while this answer came", "end");
  else if (message.state === "edited") put("edited", "You wrote this answer", "end");
  else if (message.finish) put(...(ENDS[message.finish] ?? [message.finish, `finish_reason: ${message.finish}`]), "end");
  const { usage, timings } = message;
  if (usage) put(count(message), `${usage.prompt_tokens} tokens of prompt, ${usage.prompt_tokens_details?.cached_tokens ?? 0} of them cached`);
  if (timings?.tokens_per_second) put(`${timings.tokens_per_second.toFixed(1)} tokens/s`, "From the first token on, as the server saw it");
  if (message.firstAfter !== undefined) put(`first token ${seconds(message.firstAfter)}`, "From sending to the first token, as this page saw it");
  if (timings) dequantization(timings, put);
  return line;
}

function dequantization(timings, put) {
  const spent = timings.dequant_prefill + timings.dequant_decode;
  const whole = timings.prefill + timings.decode;
  if (!(whole > 0)) return;
  const title = `This request's share of NF4 dequantization: ${seconds(timings.dequant_prefill)} in prefill, ${seconds(timings.dequant_decode)} in decode`;
  put(`NF4 dequantization ${seconds(spent)} (${((100 * spent) / whole).toFixed(1)} %)`, title);
}
