// Requests as timelines: queue, prefill, transfer, decode; one row for each, with a table inside.

import { make, say } from "./dom.js";
import { ago, count, duration } from "./units.js";

export const PHASES = [
  ["prepare", "Prepare"],
  ["queue", "Queue"],
  ["dispatch", "Wait for prefill"],
  ["prefill", "Prefill"],
  ["transfer", "Transfer (not hidden)"],
  ["wait", "Wait for decode"],
  ["decode", "Decode"],
  ["backoff", "Wait after a failure"],
];

const ENDINGS = { eos_token: "complete", length: "length", stop_sequence: "stop string" };
const STOPPED = "CancelledError"; // the client has left or cancelled: no failure

/** The phases of all attempts in order: [phase, milliseconds]. */
export function parts({ timing }) {
  if (!timing) return [];
  const attempts = timing.attempts.flatMap((attempt) => PHASES.slice(1).map(([phase]) => [phase, attempt[`${phase}_ms`]]));
  return [["prepare", timing.prepare_ms], ...attempts].filter(([, ms]) => ms > 0);
}

function table(trace) {
  const cell = (tag, text) => make(tag, {}, text);
  const rows = trace.timing.attempts.map((attempt, index) => {
    const place = trace.places[index] ?? {};
    const road = [place.prefill_worker, place.decode_worker].filter(Boolean).join(" → ") || "no worker";
    const kv = attempt.kv_transfer_ms === null ? "–" : duration(attempt.kv_transfer_ms);
    const phases = PHASES.slice(1).map(([phase]) => cell("td", duration(attempt[`${phase}_ms`])));
    return make("tr", {}, cell("th", road), ...phases, cell("td", kv), cell("td", place.failure || "ok"));
  });
  const heads = ["Workers", ...PHASES.slice(1).map(([, name]) => name), "Whole transfer", "Result"];
  return make("div", { class: "inside" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((head) => cell("th", head)))), make("tbody", {}, ...rows)));
}

class Row {
  constructor(trace) {
    this.trace = trace;
    const list = parts(trace);
    this.totalMs = trace.timing?.total_ms ?? 0;
    this.parts = list.map(([phase, ms]) => [make("span", { class: `part ${phase}`, title: `${phase} ${duration(ms)}` }), ms]);
    const lane = make("span", { class: "lane", role: "img", "aria-label": list.map(([phase, ms]) => `${phase} ${duration(ms)}`).join(", ") || "no phases" }, ...this.parts.map(([span]) => span));
    this.age = make("span");
    const isStopped = trace.error === STOPPED;
    const ending = isStopped ? "stopped by the client" : trace.error || ENDINGS[trace.finish_reason] || trace.finish_reason || "ended";
    const replays = (trace.timing?.attempts.length ?? 1) - 1;
    const tokens = `${count(trace.prompt_tokens)} + ${count(trace.completion_tokens)} tokens`;
    const about = "Tokens of the prompt + tokens of the answer";
    const what = make("span", { class: "what" }, make("b", {}, duration(this.totalMs)), ", ", make("span", { title: about }, tokens), ", ", make("span", { class: trace.error && !isStopped ? "failed" : "" }, ending), replays > 0 ? `, replayed ${replays}×` : "");
    const id = make("span", { class: "id" }, trace.request_id.slice(0, 8));
    const summary = make("summary", { title: trace.request_id }, id, lane, what);
    this.element = make("details", { class: "trace" }, summary, trace.timing ? table(trace) : make("p", { class: "inside" }, "It never reached the queue."));
  }

  /** All rows share one scale, `mostMs` long. */
  scale(mostMs) {
    for (const [span, ms] of this.parts) span.style.width = `${(100 * ms) / mostMs}%`;
  }
}

/** Hide the rows of a list whose text, or full request id, does not have the words. */
export function filterRows(list, words) {
  for (const row of list.children) {
    const text = `${row.title || row.firstChild.title} ${row.textContent}`.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
  }
}

/** The list, newest first; rows that are open stay open. */
export class Traces {
  constructor(element, empty) {
    this.element = element;
    this.empty = empty;
    this.rows = new Map();
  }

  show(traces) {
    const there = new Set(traces.map((trace) => trace.request_id));
    for (const [id, row] of this.rows) {
      if (there.has(id)) continue;
      row.element.remove();
      this.rows.delete(id);
    }
    for (const trace of traces.toReversed()) {
      if (this.rows.has(trace.request_id)) continue;
      const row = new Row(trace);
      this.rows.set(trace.request_id, row);
      this.element.prepend(row.element);
    }
    const most = Math.max(1, ...[...this.rows.values()].map((row) => row.totalMs));
    for (const row of this.rows.values()) row.scale(most);
    this.empty.hidden = this.rows.size > 0;
  }
}

const ABOUT = {
  joined: "has joined",
  ready: "takes requests again",
  draining: "takes no new requests",
  stalled: "makes no progress",
  lost: "is gone",
  stopped: "has stopped",
  switched: "has changed its role",
  tripped: "gets no requests until it passes its health check",
};

/** Why a request was replayed, in the names that logs have, and in words; ? is the worker. */
const CAUSES = {
  WorkerLost: "? was lost",
  WorkerBusy: "? had no room",
  WorkerDraining: "? is being drained",
  SequencePreempted: "? gave its memory to an older request",
  TransferFailed: "its KV did not reach ?",
  TransferCorrupt: "its KV arrived damaged at ?",
  LeaseExpired: "? waited for its KV too long",
  ReceiverLost: "? stopped before its KV had arrived",
};

/** Show incidents, newest first. */
export function showIncidents(list, empty, incidents) {
  empty.hidden = incidents.length > 0;
  while (list.children.length > incidents.length) list.lastChild.remove();
  while (list.children.length < incidents.length) list.append(make("li", {}, make("span"), make("span"), make("span")));
  incidents.forEach((incident, index) => {
    const [when, kind, what] = list.children[index].children;
    say(when, ago(incident.age_s));
    say(kind, incident.kind);
    kind.className = `kind ${incident.kind}`;
    say(what, words(incident));
    what.title = [incident.request_id, incident.cause].filter(Boolean).join(" ");
  });
}

function words({ kind, worker_id: worker, request_id: request, cause }) {
  if (!request) return `${worker} ${ABOUT[kind] ?? kind}${cause ? ` (${cause})` : ""}`;
  const reason = CAUSES[cause]?.replace("?", worker || "a worker") ?? `${cause}${worker ? ` at ${worker}` : ""}`;
  return `request ${request.slice(0, 8)}: ${reason}`;
}
