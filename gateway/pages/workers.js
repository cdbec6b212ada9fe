// A card for each worker, updated in place so that focus and selection stay.

import { post } from "./api.js";
import { make, say } from "./dom.js";
import { ago, bytes, count, percent, share } from "./units.js";

const SIGNS = { ready: "● ready", draining: "▲ draining", stalled: "■ stalled", lost: "✕ lost", stopped: "○ stopped", switching: "⇄ switching", unproven: "◌ not proven yet" };
const SVG = "http://www.w3.org/2000/svg";

const stateOf = (worker) => (worker.state === "ready" && !worker.serving ? "unproven" : worker.state);

const isGone = ({ state }) => ["lost", "stopped", "switching"].includes(state);

const otherRole = (worker) => (worker.role === "prefill" ? "decode" : "prefill");

class Card {
  constructor() {
    this.name = make("span");
    this.state = make("span", { class: "state" });
    this.meters = make("div", { class: "meters" });
    this.rows = new Map();
    this.speed = make("b");
    this.beside = make("span");
    this.line = document.createElementNS(SVG, "polyline");
    const svg = document.createElementNS(SVG, "svg");
    for (const [name, value] of [["viewBox", "0 0 59 20"], ["preserveAspectRatio", "none"], ["aria-hidden", "true"]]) svg.setAttribute(name, value);
    for (const [name, value] of [["fill", "none"], ["stroke", "currentColor"], ["stroke-width", "1.5"], ["vector-effect", "non-scaling-stroke"]]) this.line.setAttribute(name, value);
    svg.append(this.line);
    const speed = make("div", { class: "speed" }, make("span", {}, this.speed, " ", this.beside), svg);
    this.drain = make("button", { type: "button", class: "drain" });
    this.drain.addEventListener("click", () => this.#toggle());
    this.switch = make("button", { type: "button", class: "switch" });
    this.switch.addEventListener("click", () => this.#switch());
    this.problem = make("span", { class: "problem", role: "status" });
    this.element = make("article", { class: "worker card" }, make("div", { class: "name" }, this.name, this.state), this.meters, speed, this.drain, this.switch, this.problem);
  }

  async #toggle() {
    const { worker_id: id, state, role } = this.worker;
    const wish = state === "draining" ? "undrain" : "drain";
    if (wish === "drain" && this.isLast && !confirm(`${id} is the last ${role} worker in service. Drain it?`)) return;
    await this.#ask(this.drain, wish);
  }

  async #switch() {
    await this.#ask(this.switch, `switch/${otherRole(this.worker)}`);
  }

  async #ask(button, wish) {
    button.disabled = true;
    try {
      await post(`/mesh/workers/${encodeURIComponent(this.worker.worker_id)}/${wish}`);
      say(this.problem, "");
    } catch (error) {
      say(this.problem, error.message);
    }
    button.disabled = false;
  }

  show(worker, speed, isNamed, isLast) {
    Object.assign(this, { worker, isLast });
    say(this.drain, worker.state === "draining" ? "Undrain" : "Drain");
    this.drain.title = worker.state === "draining" ? "Accept new requests again" : "Finish what runs, accept no new requests";
    this.drain.hidden = isGone(worker);
    say(this.switch, `Let it ${otherRole(worker)}`);
    this.switch.title = "Finish what runs, then change the role; the model stays loaded";
    this.switch.hidden = !worker.switchable || isGone(worker) || worker.state === "draining";
    const state = stateOf(worker);
    const isAway = state === "lost" || state === "stalled";
    say(this.name, worker.worker_id);
    this.element.title = `${worker.model}, ${worker.address}, pid ${worker.pid}, ${worker.device}`;
    this.element.setAttribute("aria-label", `${worker.role} worker ${worker.worker_id}`);
    say(this.state, SIGNS[state] + (isAway || state === "stopped" ? `, last seen ${ago(worker.last_seen_s)}` : ""));
    this.state.dataset.state = state;
    this.element.classList.toggle("away", isAway);
    this.element.classList.toggle("left", state === "stopped");
    this.#row("Model", isNamed ? worker.model : null);
    const load = isGone(worker) ? { num_running: 0, num_waiting: 0, free_blocks: worker.num_blocks } : worker.load;
    const used = worker.num_blocks - load.free_blocks;
    this.#meter("KV memory", used, worker.num_blocks, percent(used, worker.num_blocks));
    if (worker.role === "decode") this.#meter("Batch", load.num_running, worker.max_num_seqs, `${load.num_running} of ${worker.max_num_seqs}`);
    this.#row("Running", worker.role === "prefill" ? String(load.num_running) : null);
    this.#row("Waiting", String(load.num_waiting));
    this.#row("To compute", worker.role === "prefill" || worker.prefilling_tokens > 0 ? `${count(worker.prefilling_tokens)} tokens` : null);
    const { tensor_parallel: tensor = 1, pipeline_parallel: pipeline = 1 } = worker;
    this.#row("Ranks", tensor * pipeline > 1 ? `${tensor}x${pipeline}` : null);
    this.#row("KV transfer", `${worker.open_transfers} on the way, ${bytes(speed.bytes)}/s`);
    say(this.speed, count(speed.tokens));
    say(this.beside, worker.role === "prefill" ? "prompt tokens/s" : "tokens/s");
    const most = Math.max(1, ...speed.history);
    const start = 60 - speed.history.length;
    this.line.setAttribute("points", speed.history.map((value, index) => `${start + index},${19 - (18 * value) / most}`).join(" "));
  }

  #meter(name, part, whole, text) {
    const row = this.#row(name, text);
    if (!row.fill) {
      row.fill = make("div", { class: "fill" });
      row.value.before(make("div", { class: "track" }, row.fill));
    }
    row.fill.style.width = `${100 * share(part, whole)}%`;
  }

  #row(name, text) {
    if (text === null) return null;
    let row = this.rows.get(name);
    if (!row) {
      row = { value: make("span", { class: "value" }) };
      this.rows.set(name, row);
      this.meters.append(make("span", { class: "label" }, name), row.value);
    }
    say(row.value, text);
    return row;
  }
}

/** The workers of one side. */
export class Side {
  constructor(element) {
    this.element = element;
    this.cards = new Map();
  }

  /** Workers of one model stand together; `models` are all that the mesh serves. */
  show(all, speeds, models) {
    const workers = all.toSorted((one, other) => one.model.localeCompare(other.model) || one.worker_id.localeCompare(other.worker_id, "en", { numeric: true }));
    const there = new Set(workers.map((worker) => worker.incarnation));
    for (const [incarnation, card] of this.cards) {
      if (there.has(incarnation)) continue;
      card.element.remove();
      this.cards.delete(incarnation);
    }
    for (const worker of workers) {
      if (!this.cards.has(worker.incarnation)) this.cards.set(worker.incarnation, new Card());
      const others = workers.filter((other) => other.serving && other.model === worker.model && other !== worker);
      this.cards.get(worker.incarnation).show(worker, speeds.of(worker), models.size > 1, others.length === 0);
    }
    const inOrder = workers.map((worker) => this.cards.get(worker.incarnation).element);
    if (inOrder.some((element, index) => this.element.children[index] !== element)) this.element.replaceChildren(...inOrder);
  }
}
