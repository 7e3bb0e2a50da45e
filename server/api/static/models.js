// Which model a conversation is with: the list of them, and what a new chat says of it.

import { takesImages } from "./api.js";
import { setTakesImages } from "./attachments.js";
import { at, element } from "./dom.js";
import { served } from "./server.js";

/** The model that settings name, or the first; undefined while none is known. */
export const chosenModel = (settings) => served.find((one) => one.id === settings.model) ?? served[0];

/** Show the models that there are, and the one that settings name. */
export function showModels(settings) {
  const option = (one) => element("option", { value: one.id, text: one.id });
  const adapters = served.filter((one) => one.parent);
  const options = served.filter((one) => !one.parent).map(option);
  if (adapters.length) options.push(element("optgroup", { label: "Adapters" }, ...adapters.map(option)));
  const model = chosenModel(settings);
  const select = at("model");
  const now = JSON.stringify(served.map((one) => [one.id, one.parent]));
  if (select.dataset.options !== now) select.replaceChildren(...options);
  select.dataset.options = now;
  select.disabled = !model;
  if (model) select.value = model.id;
  at("welcome-model").textContent = model?.id ?? "NF4 server";
  const length = model?.max_model_len;
  at("welcome-about").textContent = length ? `${model.parent ? `An adapter of ${model.parent}` : "Served in 4-bit NF4"} · ${length.toLocaleString("en")} tokens of context` : "";
  setTakesImages(takesImages(model));
}
