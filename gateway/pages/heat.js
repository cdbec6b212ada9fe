// A strip that shows how sure the model was along a long answer. A click, or the arrow keys, go to the place.

import { make } from "./dom.js";
import { percent } from "./tokens.js";

const LEAST = 120; // tokens; shorter answers are seen at a glance
const BINS = 160;

/** Mean log-prob and the least sure token of each part of the answer. */
export function bins(tokens, count = BINS) {
  const size = Math.max(1, tokens.length / count);
  return Array.from({ length: Math.ceil(tokens.length / size) }, (_, index) => {
    const [from, to] = [Math.floor(index * size), Math.min(tokens.length, Math.floor((index + 1) * size))];
    let [sum, worst] = [0, from];
    for (let at = from; at < to; at++) {
      sum += tokens[at].logprob;
      if (tokens[at].logprob < tokens[worst].logprob) worst = at;
    }
    return { mean: to > from ? sum / (to - from) : 0, worst };
  });
}

export class HeatStrip {
  /** `go` is called with the number of a token. */
  constructor(go) {
    this.go = go;
    this.canvas = make("canvas", { "aria-hidden": "true", height: 14 });
    this.element = make("div", {
      class: "heat", role: "slider", tabindex: 0, hidden: true, "aria-label": "Confidence along the answer", "aria-valuemin": 0,
      "aria-valuemax": 0, "aria-valuenow": 0, title: "How sure the model was, from beginning to end. Click to go there.",
    }, this.canvas);
    this.bins = [];
    this.at = 0;
    this.element.addEventListener("click", (event) => {
      const { left, width } = this.element.getBoundingClientRect();
      this.#to(Math.floor(((event.clientX - left) / width) * this.bins.length));
    });
    this.element.addEventListener("keydown", (event) => {
      const to = { ArrowRight: this.at + 1, ArrowLeft: this.at - 1, Home: 0, End: this.bins.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.#to(to);
    });
  }

  draw(tokens) {
    this.element.hidden = tokens.length < LEAST;
    if (this.element.hidden) return;
    this.tokens = tokens;
    this.bins = bins(tokens);
    this.element.setAttribute("aria-valuemax", this.bins.length - 1);
    this.#describe();
    const [width, height] = [(this.canvas.width = this.bins.length * 4), this.canvas.height];
    const paint = this.canvas.getContext("2d");
    paint.clearRect(0, 0, width, height);
    paint.fillStyle = getComputedStyle(this.element).color;
    this.bins.forEach(({ mean }, index) => {
      const doubt = 1 - Math.exp(mean);
      paint.globalAlpha = 0.08 + 0.92 * Math.min(1, doubt * 1.6);
      paint.fillRect(index * 4, 0, 4, height);
    });
  }

  #to(index) {
    this.at = Math.max(0, Math.min(this.bins.length - 1, index));
    this.#describe();
    this.go(this.bins[this.at].worst);
  }

  #describe() {
    const { mean, worst } = this.bins[Math.min(this.at, this.bins.length - 1)];
    this.element.setAttribute("aria-valuenow", this.at);
    this.element.setAttribute("aria-valuetext", `token ${worst + 1} of ${this.tokens.length}, ${percent(Math.exp(mean))} sure here`);
  }
}
