// LangChain.js: ChatOpenAI on its defaults: an answer, a stream, tools and their results, a structured answer.
import assert from "node:assert/strict";
import { ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const { BASE_URL, MODEL } = process.env;
const common = { model: MODEL, apiKey: "none", configuration: { baseURL: `${BASE_URL}/v1` }, maxTokens: 100 };
const question = "What is the capital of France?";
const weather = tool(async ({ city }) => `22 degrees in ${city}`, {
  name: "weather",
  description: "The weather in a city.",
  schema: z.object({ city: z.enum(["Paris", "Rome"]) }),
});

for (const useResponsesApi of [false, true]) {
  const model = new ChatOpenAI({ ...common, useResponsesApi });
  assert.ok((await model.invoke(question)).text.length > 0);
  let text = "";
  for await (const chunk of await model.stream(question)) text += chunk.text;
  assert.ok(text.length > 0);
  const called = await model.bindTools([weather], { tool_choice: "weather" }).invoke("The weather in Rome?");
  assert.equal(called.tool_calls[0].name, "weather");
  const results = await Promise.all(
    called.tool_calls.map(async (call) => new ToolMessage({ content: await weather.invoke(call.args), tool_call_id: call.id })),
  );
  const after = await model.bindTools([weather], { tool_choice: "none" }).invoke(
    [{ role: "user", content: "The weather in Rome?" }, called, ...results],
  );
  assert.ok(after.text.length > 0);
  const form = z.object({ capital: z.enum(["Paris", "Rome"]) });
  const answer = await model.withStructuredOutput(form).invoke(question);
  assert.ok(["Paris", "Rome"].includes(answer.capital));
}
