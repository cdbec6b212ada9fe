// The mesh page: polls the state once a second while the page is visible, and shows it.

import { get, saveKey } from "./api.js";
import { $, make, say } from "./dom.js";
import { Speeds } from "./speeds.js";
import { Running } from "./running.js";
import { storedTheme, useTheme } from "./theme.js";
import { Timeline } from "./timeline.js";
import { Traffic } from "./traffic.js";
import { PHASES, Traces, filterRows, showIncidents } from "./traces.js";
import { bytes, count } from "./units.js";
import { Side } from "./workers.js";

const INTERVAL_MS = 1000;

useTheme(storedTheme());
const speeds = new Speeds();
const sides = { prefill: new Side($("prefill")), decode: new Side($("decode")) };
const traces = new Traces($("traces"), $("no-traces"));
const running = new Running($("running"), $("no-running"));
const traffic = new Traffic($("traffic"), $("revisions"));
const timeline = new Timeline($("timeline"), $("timeline-span"));
const figures = new Map();
let isPaused = false;
let timer = null;

function figure(name, value, isWarning = false) {
  if (!figures.has(name)) {
    const element = make("div", {}, make("dt", {}, name), make("dd"));
    figures.set(name, element);
    $("figures").append(element);
  }
  say(figures.get(name).lastChild, value);
  figures.get(name).classList.toggle("warn", isWarning);
}

function showVerdict({ level, headline, detail }) {
  $("verdict").dataset.level = level;
  say($("headline"), headline);
  say($("detail"), detail);
}

/** What the router advises, a line each. */
function showAdvice(advice) {
  const lines = advice.map(({ action, role, reason }) => `${action === "add" ? "Add a" : "Remove one of the"} ${role} worker${action === "add" ? "" : "s"}: ${reason}.`);
  $("advice").hidden = lines.length === 0;
  if (lines.join() !== [...$("advice").children].map((line) => line.textContent).join()) $("advice").replaceChildren(...lines.map((line) => make("li", {}, line)));
}

function show(state) {
  speeds.update(state);
  const [prefill, decode] = ["prefill", "decode"].map((role) => state.workers.filter((worker) => worker.role === role));
  showVerdict(state.verdict);
  showAdvice(state.advice);
  for (const side of document.querySelectorAll(".side")) side.classList.toggle("pressed", Boolean(state.shortage) && state.verdict.side === side.dataset.role);
  figure("waiting", count(state.queued_requests), state.queued_requests > 0);
  figure("in service", count(state.active_requests));
  figure("tokens/s", count(speeds.sum(decode, "tokens")));
  figure("prompt tokens/s", count(speeds.sum(prefill, "tokens")));
  figure("ended", count(state.ended_choices));
  figure("replays", count(state.replays));
  figure("failed", count(state.failed_choices), state.failed_choices > 0);
  traffic.show(state);
  showWire(prefill);
  const models = new Set(state.workers.map(({ model }) => model));
  sides.prefill.show(prefill, speeds, models);
  sides.decode.show(decode, speeds, models);
  running.show(state.running);
  say($("running-count"), state.running.length < state.active_requests ? `the oldest ${state.running.length} of ${count(state.active_requests)}` : "");
  traces.show(state.traces);
  showIncidents($("incidents"), $("no-incidents"), state.incidents);
  filter();
}

/** Show only requests that have the words of the filter: ids, workers, endings. */
function filter() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const id of ["running", "traces"]) filterRows($(id), words);
}

function showWire(prefill) {
  const rate = `${bytes(speeds.sum(prefill, "bytes"))}/s`;
  const open = prefill.reduce((sum, worker) => sum + worker.open_transfers, 0);
  const moved = bytes(prefill.reduce((sum, worker) => sum + worker.transferred_bytes, 0));
  say($("wire-rate"), `KV ${rate}`);
  say($("wire-open"), `${open} on the way, ${moved} so far`);
  $("wire").setAttribute("aria-label", `KV transfer: ${rate}, ${open} on the way, ${moved} so far`);
  $("wire").classList.toggle("moving", open > 0 || speeds.sum(prefill, "bytes") > 0);
}

async function refresh() {
  try {
    show(await get("/mesh/state"));
    await timeline.refresh();
    $("unlock").hidden = true;
    $("mesh").classList.remove("locked");
    say($("fresh"), "live");
  } catch (error) {
    say($("fresh"), "not live");
    $("unlock").hidden = ![401, 403].includes(error.status);
    $("mesh").classList.toggle("locked", !$("unlock").hidden);
    showVerdict({ level: "down", headline: error.status ? "The mesh cannot be shown" : "No answer", detail: error.message });
  }
}

async function run() {
  clearTimeout(timer);
  if (isPaused || document.hidden) return;
  await refresh();
  clearTimeout(timer);
  timer = setTimeout(run, INTERVAL_MS);
}

$("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  $("pause").setAttribute("aria-pressed", isPaused);
  say($("fresh"), isPaused ? "paused" : "live");
  run();
});
$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey($("key").value.trim());
  run();
});
$("filter").addEventListener("input", filter);
document.addEventListener("visibilitychange", run);

$("legend").append(...PHASES.map(([phase, name]) => make("li", {}, make("i", { class: phase }), name)));
$("incomplete").remove();
run();
