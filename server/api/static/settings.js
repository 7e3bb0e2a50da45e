// Settings: the form, and what of it goes into a request. A field that is empty is not sent; the model's default counts.

import { at } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty"];

/** Options of a request, of the settings that are set. */
export function samplingOptions(settings) {
  const options = {};
  for (const name of NUMBERS) if (Number.isFinite(settings[name])) options[name] = settings[name];
  if (settings.reasoning_effort) options.reasoning_effort = settings.reasoning_effort;
  const stop = settings.stop?.split("\n").filter((line) => line).map((line) => line.replaceAll("\\n", "\n"));
  if (stop?.length) options.stop = stop;
  return options;
}

/** What the form says. */
export function readForm() {
  const { elements } = at("settings-form");
  const settings = {};
  for (const name of NUMBERS) if (elements[name].value.trim() !== "") settings[name] = Number(elements[name].value);
  for (const name of ["system", "stop", "reasoning_effort"]) if (elements[name].value) settings[name] = elements[name].value;
  return settings;
}

/** Show settings in the form. */
export function fillForm(settings) {
  const { elements } = at("settings-form");
  for (const name of [...NUMBERS, "system", "stop", "reasoning_effort"]) elements[name].value = settings[name] ?? "";
  at("more-sampling").open = ["top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop"].some(
    (name) => settings[name] !== undefined,
  );
}

/** Whether every field holds what it may; shows the first that does not. */
export function checkForm() {
  const form = at("settings-form");
  if (form.checkValidity()) return true;
  if (!at("settings").open) at("settings").showModal();
  const wrong = form.querySelector(":invalid:not(fieldset)");
  if (wrong.closest("details")) wrong.closest("details").open = true;
  form.reportValidity();
  return false;
}
