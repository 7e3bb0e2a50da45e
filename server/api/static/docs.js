// The OpenAPI document as a page on which every endpoint can be tried.

import { at, element } from "./dom.js";
import { apiKey, keepApiKey } from "./store.js";

async function send(method, path, body, output) {
  const key = apiKey();
  const headers = { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...(body === undefined ? {} : { "Content-Type": "application/json" }) };
  output.textContent = "…";
  try {
    const answer = await fetch(path.slice(1), { method, headers, body });
    output.textContent = `${answer.status}\n`;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) output.textContent += part.value;
  } catch (error) {
    output.textContent = String(error);
  }
}

function endpoint(path, method, operation) {
  const title = element(
    "summary",
    {},
    element("span", { class: "method", text: method.toUpperCase() }),
    element("code", { text: path }),
    element("span", { text: ` ${operation.summary ?? ""}` }),
  );
  const box = element("details", {}, title, element("p", { text: operation.description ?? "" }));
  const content = operation.requestBody?.content?.["application/json"];
  let input;
  if (content) {
    if (content.schema?.$ref) box.append(element("p", { text: `Body: ${content.schema.$ref.split("/").pop()} (below)` }));
    input = element("textarea", { "aria-label": `Body of ${path}`, spellcheck: "false" });
    input.value = JSON.stringify(content.example ?? {}, null, 2);
    box.append(input);
  }
  const output = element("pre");
  const click = () => send(method.toUpperCase(), path, input?.value, output);
  const statuses = Object.entries(operation.responses).map(([status, { description }]) => element("li", { text: `${status}: ${description}` }));
  box.append(element("button", { type: "button", class: "main", text: "Send", click }), output, element("ul", {}, ...statuses));
  return box;
}

at("key").value = apiKey();
at("key").addEventListener("change", () => keepApiKey(at("key").value.trim()));
const api = await (await fetch("openapi.json")).json();
for (const [path, methods] of Object.entries(api.paths))
  for (const [method, operation] of Object.entries(methods)) at("endpoints").append(endpoint(path, method, operation));
for (const [name, schema] of Object.entries(api.components?.schemas ?? {}))
  at("schemas").append(element("details", {}, element("summary", { text: name }), element("pre", { text: JSON.stringify(schema, null, 2) })));
