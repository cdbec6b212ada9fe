// Running requests: the workers and the phases of each, on one time scale.

import { make, say } from "./dom.js";
import { PHASES, parts } from "./traces.js";
import { count, duration } from "./units.js";

const NAMES = new Map(PHASES);

class Row {
  constructor(id) {
    this.lane = make("span", { class: "lane", role: "img" });
    this.phase = make("b");
    this.rest = make("span");
    const what = make("span", { class: "what" }, this.phase, this.rest);
    this.element = make("div", { class: "trace running", title: id }, make("span", { class: "id" }, id.slice(0, 8)), this.lane, what);
  }

  show(request, mostMs) {
    const list = parts(request);
    const phase = list.length ? list.at(-1)[0] : "prepare";
    const place = request.places.at(-1) ?? {};
    const road = [place.prefill_worker, place.decode_worker].filter(Boolean).join(" → ");
    const replays = Math.max(0, request.places.length - 1);
    const facts = [duration(1000 * request.age_s), `${count(request.prompt_tokens)} + ${count(request.completion_tokens)} tokens`, road, replays ? `replayed ${replays}×` : ""];
    say(this.phase, NAMES.get(phase));
    say(this.rest, `, ${facts.filter(Boolean).join(", ")}`);
    const spans = list.map(([name, ms]) => {
      const span = make("span", { class: `part ${name}`, title: `${name} ${duration(ms)}` });
      span.style.width = `${(100 * ms) / mostMs}%`;
      return span;
    });
    this.lane.replaceChildren(...spans);
    this.lane.setAttribute("aria-label", list.map(([name, ms]) => `${name} ${duration(ms)}`).join(", ") || "not in the queue yet");
  }
}

/** The list, oldest first, on one scale. */
export class Running {
  constructor(element, empty) {
    this.element = element;
    this.empty = empty;
    this.rows = new Map();
  }

  show(requests) {
    const there = new Set(requests.map((request) => request.request_id));
    for (const [id, row] of this.rows) {
      if (there.has(id)) continue;
      row.element.remove();
      this.rows.delete(id);
    }
    const mostMs = Math.max(1, ...requests.map((request) => request.timing?.total_ms ?? 0));
    for (const request of requests) {
      if (!this.rows.has(request.request_id)) this.rows.set(request.request_id, new Row(request.request_id));
      const row = this.rows.get(request.request_id);
      row.show(request, mostMs);
      this.element.append(row.element);
    }
    this.empty.hidden = this.rows.size > 0;
  }
}
