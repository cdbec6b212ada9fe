// What the router has done over time: a few figures, from minutes to a day.

import { get } from "./api.js";
import { make, say } from "./dom.js";
import { ago, count, duration } from "./units.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, ALONE] = [480, 40, 5];
const INTERVAL_MS = 5000; // the router takes a reading as often

const svg = (tag, attributes) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};

const line = (kind) => svg("path", { class: kind, fill: "none", stroke: "currentColor", "stroke-width": 1.5, "stroke-linecap": "round", "vector-effect": "non-scaling-stroke" });

/** One or two values of each point over time: the second, a high percentile, is drawn thinner. */
class Chart {
  constructor(name, format, value, high = null, about = "") {
    Object.assign(this, { name, format, about, values: high ? [value, high] : [value], points: [], spanS: 1, most: "" });
    this.now = make("b");
    this.foot = make("span", { class: "foot" });
    this.lines = this.values.map((_, rank) => line(rank ? "high" : "usual"));
    this.box = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.pointer = line("pointer");
    this.box.append(...this.lines, this.pointer);
    this.since = make("span");
    const axis = make("div", { class: "axis", "aria-hidden": "true" }, this.since, make("span", {}, "now"));
    this.element = make("div", { class: "chart card" }, make("div", { class: "head" }, make("span", {}, name), this.now), this.box, axis, this.foot);
    this.box.addEventListener("pointermove", (event) => this.#point(event));
    this.box.addEventListener("pointerleave", () => (this.pointer.removeAttribute("d"), say(this.foot, this.most)));
  }

  /** Say what the reading nearest to the pointer was, and when. */
  #point({ clientX }) {
    const { left, width } = this.box.getBoundingClientRect();
    const age = this.spanS * (1 - (clientX - left) / width);
    const distance = (point) => Math.abs(point.age_s - age);
    const known = this.points.filter((point) => this.values[0](point) !== null);
    if (!known.length) return;
    const nearest = known.reduce((best, point) => (distance(point) < distance(best) ? point : best));
    say(this.foot, `${ago(nearest.age_s)}: ${this.values.map((value) => this.format(value(nearest))).join(" · ")}`);
    const x = (WIDTH * (1 - Math.min(1, nearest.age_s / this.spanS))).toFixed(1);
    this.pointer.setAttribute("d", `M${x} 0V${HEIGHT}`);
  }

  show(points, spanS) {
    Object.assign(this, { points, spanS });
    say(this.since, ago(spanS));
    const rows = this.values.map((value) => points.map((point) => [point, value(point)]).filter(([, number]) => number !== null));
    const most = Math.max(0, ...rows.flat().map(([, number]) => number));
    rows.forEach((row, rank) => this.lines[rank].setAttribute("d", path(row, spanS, most || 1)));
    say(this.now, rows.map((row) => (row.length ? this.format(row.at(-1)[1]) : "–")).join(" · "));
    this.most = [this.about, most ? `at most ${this.format(most)}` : ""].filter(Boolean).join(", ");
    if (!this.pointer.hasAttribute("d")) say(this.foot, this.most);
    this.box.setAttribute("aria-label", `${this.name} over time: now ${this.now.textContent}, ${this.most || "nothing yet"}`);
  }
}

/** A line through the values; it breaks where points are missing. A point alone is a short stroke, to be seen at all. */
function path(row, spanS, most) {
  const follows = (rank) => {
    const [[{ age_s: age, length_s: length }], [earlier]] = [row[rank], row[rank - 1]];
    return earlier.age_s - age < 1.5 * (length + earlier.length_s);
  };
  const steps = row.map(([{ age_s: age }, value], rank) => {
    const [isJoined, isJoining] = [rank > 0 && follows(rank), rank + 1 < row.length && follows(rank + 1)];
    const x = WIDTH * (1 - Math.min(1, age / spanS));
    const y = HEIGHT - 1 - ((HEIGHT - 2) * value) / most;
    return `${isJoined ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}h${isJoined || isJoining ? 0.1 : ALONE}`;
  });
  return steps.join("");
}

const each = (name) => (point) => point[name] / point.length_s;
const inMs = (name) => (point) => (point[name] === null ? null : 1000 * point[name]);

export class Timeline {
  /** `choice` is a select of seconds. */
  constructor(element, choice) {
    this.choice = choice;
    this.shownMs = -Infinity;
    this.charts = [
      new Chart("tokens/s", count, each("generated_tokens")),
      new Chart("prompt tokens/s", count, each("computed_tokens")),
      new Chart("first token", duration, inMs("first_token_p50_s"), inMs("first_token_p95_s"), "p50 · p95"),
      new Chart("gap", duration, inMs("gap_p50_s"), inMs("gap_p99_s"), "p50 · p99"),
      new Chart("running · waiting", count, ({ running }) => running, ({ waiting }) => waiting),
      new Chart("decode's KV", (value) => `${value < 10 ? value.toFixed(1) : Math.round(value)} %`, ({ kv_used: used }) => (used === null ? null : 100 * used)),
      new Chart("replays · failed", count, ({ replays }) => replays, ({ failed_choices: failed }) => failed),
    ];
    element.append(...this.charts.map((chart) => chart.element));
    choice.addEventListener("change", () => this.refresh(true));
  }

  /** Ask the router, unless that was a moment ago. */
  async refresh(isChosen = false) {
    if (!isChosen && performance.now() - this.shownMs < INTERVAL_MS) return;
    this.shownMs = performance.now();
    const spanS = Number(this.choice.value);
    const { points } = await get(`/mesh/history?span_s=${spanS}`);
    for (const chart of this.charts) chart.show(points, spanS);
  }
}
