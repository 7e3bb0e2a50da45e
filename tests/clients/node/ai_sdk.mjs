// The Vercel AI SDK with its OpenAI (chat and responses), OpenAI-compatible and Anthropic providers, on their defaults.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { BASE_URL, MODEL } = process.env;
const openai = createOpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: "none" });
const anthropic = createAnthropic({ baseURL: `${BASE_URL}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "nf4", baseURL: `${BASE_URL}/v1`, apiKey: "none", supportsStructuredOutputs: true,
});
const models = {
  "openai chat": openai.chat(MODEL),
  "openai responses": openai.responses(MODEL),
  "openai-compatible": compatible(MODEL),
  anthropic: anthropic(MODEL),
};
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async ({ city }) => `22 degrees in ${city}`,
});
const question = "What is the capital of France?";

for (const [name, model] of Object.entries(models)) {
  const whole = await generateText({ model, prompt: question, system: "Be brief.", maxOutputTokens: 24, temperature: 0 });
  assert.match(whole.text, /Paris/, name);

  const streamed = streamText({ model, prompt: question, maxOutputTokens: 24, onError: ({ error }) => { throw error; } });
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  assert.ok(text.length > 0, name);

  const called = streamText({
    model, prompt: "What is the weather in Rome?", tools: { weather }, toolChoice: "required", maxOutputTokens: 200,
    stopWhen: stepCountIs(2), onError: ({ error }) => { throw error; },
  });
  for await (const part of called.fullStream) assert.notEqual(part.type, "error", name);
  const steps = await called.steps;
  assert.equal(steps.length, 2, name);
  assert.match(steps[0].toolResults[0].output, /22 degrees/, name);

  const form = Output.object({ schema: z.object({ capital: z.enum(["Paris", "Rome"]) }) });
  const structured = await generateText({ model, prompt: question, output: form, maxOutputTokens: 64 });
  assert.ok(["Paris", "Rome"].includes(structured.output.capital), name);
}
