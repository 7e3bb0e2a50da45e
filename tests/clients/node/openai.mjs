// The openai package for Node: answers that are to be stored, streams, tools, responses.
import assert from "node:assert/strict";
import OpenAI from "openai";

const { BASE_URL, MODEL } = process.env;
const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: "none" });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const common = { model: MODEL, messages, max_completion_tokens: 24 };

const { data: whole, response } = await client.chat.completions
  .create({ ...common, store: true, metadata: { a: "b" }, temperature: 0 }).withResponse();
assert.match(whole.choices[0].message.content, /Paris/);
assert.match(response.headers.get("x-ignored-options"), /\bstore\b/);

let text = "";
const stream = await client.chat.completions.create({ ...common, store: true, stream: true });
for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
assert.ok(text.length > 0);

const parameters = {
  type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"], additionalProperties: false,
};
const asked = [];
const runner = client.chat.completions.runTools({
  model: MODEL, messages, max_completion_tokens: 200, tool_choice: { type: "function", function: { name: "weather" } },
  tools: [{ type: "function", function: { name: "weather", description: "Weather.", parameters, strict: true,
    parse: JSON.parse, function: async (given) => { asked.push(given); return "22 degrees"; } } }],
});
await runner.done();
assert.ok(["Paris", "Rome"].includes(asked[0].city));

const answer = await client.responses.create({ model: MODEL, input: "What is the capital of France?", store: true, max_output_tokens: 24, temperature: 0 });
assert.match(answer.output_text, /Paris/);
for await (const event of client.responses.stream({ model: MODEL, input: "Hello.", max_output_tokens: 8 })) {
  assert.notEqual(event.type, "response.failed");
}
