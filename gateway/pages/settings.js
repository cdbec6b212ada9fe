// Settings: remembered in this browser, with presets. The API key stays in its tab.

import { saveKey, savedKey } from "./api.js";
import { $, make, say } from "./dom.js";
import { browser } from "./remembered.js";
import { storeTheme, storedTheme, useTheme } from "./theme.js";

const [STORED, PRESETS] = ["tandem-settings", "tandem-presets"];
const SAMPLING = ["temperature", "top_p", "top_k", "max_tokens", "seed", "repetition_penalty", "stop"];
const REMEMBERED = [...SAMPLING, "system", "other_temperature"];
const OWN = { Exact: { temperature: 0, top_p: 1 }, Balanced: { temperature: 0.7, top_p: 0.95 }, Creative: { temperature: 1.1, top_p: 0.95 } };

const read = (name) => {
  try {
    return JSON.parse(browser.get(name)) ?? {};
  } catch {
    return {};
  }
};
const write = (name, value) => browser.set(name, JSON.stringify(value));

const field = (name) => $("controls").elements[name];
const number = (name) => (field(name).value === "" ? undefined : Number(field(name).value));

/** The settings as members of OpenAI's API. Empty ones are left out, so that the server chooses. */
export const sampling = () => ({
  temperature: number("temperature"),
  top_p: number("top_p"),
  top_k: number("top_k"),
  max_tokens: number("max_tokens"),
  seed: number("seed"),
  repetition_penalty: number("repetition_penalty"),
  stop: field("stop").value || undefined,
});

export const system = () => field("system").value.trim();
export const otherTemperature = () => number("other_temperature") ?? 1;

function keep() {
  const values = Object.fromEntries(REMEMBERED.map((name) => [name, field(name).value]));
  write(STORED, { ...values, colours: $("colours").checked });
  storeTheme(field("theme").value);
}

function showRanges() {
  for (const output of document.querySelectorAll("#controls output")) output.value = $(output.htmlFor.value).value;
}

function applyLooks() {
  useTheme(field("theme").value);
  document.body.classList.toggle("coloured", $("colours").checked);
}

function fill(values) {
  for (const name of REMEMBERED) if (values[name] !== undefined && field(name)) field(name).value = values[name];
  if (values.colours !== undefined) $("colours").checked = values.colours;
  showRanges();
  applyLooks();
}

function showPresets() {
  const all = { ...OWN, ...read(PRESETS) };
  $("preset").replaceChildren(make("option", { value: "" }, "Choose …"), ...Object.keys(all).map((name) => make("option", {}, name)));
}

function usePreset(name) {
  const blank = Object.fromEntries(SAMPLING.map((each) => [each, ""]));
  const preset = OWN[name] ?? read(PRESETS)[name];
  if (preset) fill({ ...blank, temperature: 0, top_p: 1, ...preset });
  $("forget-preset").hidden = !(name in read(PRESETS));
  keep();
}

function savePreset() {
  const name = $("preset-name").value.trim();
  if (!name) return $("preset-name").focus();
  const values = Object.fromEntries([...SAMPLING, "system"].map((each) => [each, field(each).value]));
  write(PRESETS, { ...read(PRESETS), [name]: values });
  showPresets();
  $("preset").value = name;
  $("forget-preset").hidden = false;
  return ($("preset-name").value = "");
}

function forgetPreset() {
  const { [$("preset").value]: gone, ...rest } = read(PRESETS);
  write(PRESETS, rest);
  showPresets();
  $("forget-preset").hidden = true;
}

let isForKey = false;

export function openSettings() {
  isForKey = false;
  if (!$("settings").open) $("settings").showModal();
}

/** Ask for an API key: there is none, or it has been refused. */
export function askForKey() {
  openSettings();
  isForKey = true;
  say($("key-status"), savedKey() ? "This key was not accepted." : "");
  $("key").focus();
}

/** The gateway has answered with this key, so the settings close if they asked for one. */
export function keyAccepted() {
  say($("key-status"), savedKey() ? "This key is accepted." : "");
  if (isForKey) $("settings").close();
  isForKey = false;
}

/** Bring back what was remembered. `onKey` is called when another API key is entered. */
export function startSettings(onKey) {
  const controls = $("controls");
  controls.addEventListener("submit", (event) => event.preventDefault());
  controls.addEventListener("input", () => (showRanges(), applyLooks(), keep()));
  $("compare-bar").addEventListener("input", keep);
  $("preset").addEventListener("change", () => usePreset($("preset").value));
  $("save-preset").addEventListener("click", savePreset);
  $("forget-preset").addEventListener("click", forgetPreset);
  $("key").addEventListener("change", () => (saveKey($("key").value.trim()), say($("key-status"), ""), onKey()));
  $("open-settings").addEventListener("click", () => openSettings());
  $("close-settings").addEventListener("click", () => $("settings").close());
  $("settings").addEventListener("click", (event) => event.target === $("settings") && $("settings").close());
  $("key").value = savedKey();
  field("theme").value = storedTheme();
  showPresets();
  fill(read(STORED));
}
