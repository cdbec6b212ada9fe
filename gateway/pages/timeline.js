// What has happened since the page was opened: a few figures over time, from minutes to a day.

import { make, say } from "./dom.js";
import { count, duration } from "./units.js";

const MOST = 480; // points; when there are more, each two become one, so that a day has as many as a minute
const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [MOST, 40];

const svg = (tag, attributes) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};

/** Points at equal steps; null where nothing was measured. */
export class Series {
  constructor() {
    this.points = [];
    this.step = 1; // samples in a point
    this.part = [];
  }

  add(value) {
    this.part.push(value);
    if (this.part.length < this.step) return;
    this.points.push(mean(this.part));
    this.part = [];
    if (this.points.length <= MOST) return;
    const pairs = this.points.length >> 1;
    this.points = Array.from({ length: pairs }, (_, index) => mean(this.points.slice(2 * index, 2 * index + 2)));
    this.step *= 2;
  }
}

const mean = (values) => {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
};

class Chart {
  constructor(name, format) {
    Object.assign(this, { name, format, series: new Series() });
    this.now = make("b");
    this.most = make("span", { class: "most" });
    this.line = svg("path", { fill: "none", stroke: "currentColor", "stroke-width": 1.5, "stroke-linecap": "round", "vector-effect": "non-scaling-stroke" });
    this.box = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.box.append(this.line);
    this.element = make("div", { class: "chart card" }, make("div", { class: "head" }, make("span", {}, name), this.now), this.box, this.most);
  }

  add(value) {
    this.series.add(value);
    const { points } = this.series;
    const most = Math.max(0, ...points.filter((point) => point !== null));
    const across = WIDTH / Math.max(1, points.length - 1);
    const known = points.map((point, index) => [index, point]).filter(([, point]) => point !== null);
    const steps = known.map(([index, point], rank) => `${rank ? "L" : "M"}${(index * across).toFixed(1)} ${(HEIGHT - 1 - ((HEIGHT - 2) * point) / (most || 1)).toFixed(1)}h.1`);
    this.line.setAttribute("d", steps.join(""));
    const last = points.findLast((point) => point !== null) ?? null;
    say(this.now, last === null ? "–" : this.format(last));
    say(this.most, most ? `at most ${this.format(most)}` : "");
    this.box.setAttribute("aria-label", `${this.name} over time: now ${this.now.textContent}, ${this.most.textContent || "nothing yet"}`);
  }
}

const middle = (values, share) => {
  const sorted = values.filter((value) => value !== null && value !== undefined).sort((one, other) => one - other);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : null;
};

const freeShare = (workers) => {
  const whole = workers.reduce((sum, { num_blocks: blocks }) => sum + blocks, 0);
  const free = workers.reduce((sum, { load }) => sum + load.free_blocks, 0);
  return whole ? 100 * (1 - free / whole) : null;
};

export class Timeline {
  constructor(element, title) {
    this.title = title;
    this.since = performance.now();
    this.seen = new Set();
    this.charts = {
      tokens: new Chart("tokens/s", count),
      first: new Chart("time to first token, p95", duration),
      queue: new Chart("waiting", count),
      kv: new Chart("KV memory of decode", (value) => `${Math.round(value)} %`),
    };
    element.append(...Object.values(this.charts).map((chart) => chart.element));
  }

  /** Add a state; `tokens` is the rate of all decode workers. */
  add(state, tokens) {
    const fresh = state.traces.filter(({ request_id: id }) => !this.seen.has(id));
    this.seen = new Set(state.traces.map(({ request_id: id }) => id));
    const decode = state.workers.filter(({ role, state: condition }) => role === "decode" && condition !== "lost");
    this.charts.tokens.add(tokens);
    this.charts.first.add(middle(fresh.map(({ timing }) => timing?.first_token_ms), 0.95));
    this.charts.queue.add(state.queued_requests);
    this.charts.kv.add(freeShare(decode));
    say(this.title, `in the last ${duration(performance.now() - this.since)}, while this page was open`);
  }
}
