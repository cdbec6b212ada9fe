// A text that grows token by token, and which token each of its characters came from.

import { make } from "./dom.js";

const STEPS = [0.9, 0.7, 0.4, 0.15];

/** Confidence step of a token: 0 is the most confident, 4 the least. */
export const step = (logprob) => {
  const index = STEPS.findIndex((least) => Math.exp(logprob) >= least);
  return index < 0 ? STEPS.length : index;
};

export class Region {
  /** `tokens` is the list of all tokens of the answer; a region refers to them by number. */
  constructor(tokens = []) {
    this.tokens = tokens;
    this.text = "";
    this.numbers = [];
    this.ends = [];
  }

  /** Append text of token `number`. Text without a token (null) belongs to the token before. */
  add(text, number) {
    if (!text) return;
    this.text += text;
    if (number !== null && this.numbers.at(-1) !== number) {
      this.numbers.push(number);
      this.ends.push(this.text.length);
    } else if (this.ends.length) {
      this.ends[this.ends.length - 1] = this.text.length;
    }
  }

  /** Remove characters at the end, and return them. */
  drop(size) {
    const kept = this.text.length - size;
    const dropped = this.text.slice(kept);
    this.text = this.text.slice(0, kept);
    while (this.ends.length && (this.ends.at(-2) ?? 0) >= kept) {
      this.ends.pop();
      this.numbers.pop();
    }
    if (this.ends.length) this.ends[this.ends.length - 1] = Math.min(this.ends.at(-1), kept);
    return dropped;
  }

  /** Index into `numbers` of the token at a character. */
  #indexAt(offset) {
    let [low, high] = [0, this.ends.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] > offset) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** Append `text`, which begins at `offset` of this region, to an element: a span per token. */
  paint(parent, text, offset) {
    if (offset === null || !this.ends.length) {
      parent.append(text);
      return;
    }
    let index = this.#indexAt(offset);
    for (let done = 0; done < text.length; index++) {
      const end = index < this.ends.length ? Math.min(text.length, this.ends[index] - offset) : text.length;
      const piece = text.slice(done, end);
      if (index < this.ends.length) parent.append(this.#span(this.numbers[index], piece));
      else parent.append(piece);
      done = end;
    }
  }

  #span(number, text) {
    const span = document.createElement("span"); // the loop's cost: no helper here
    span.className = `token s${step(this.tokens[number].logprob)}`;
    span.tabIndex = -1;
    span.dataset.t = number;
    span.textContent = text;
    return span;
  }

  /** Mark an element that shows several tokens as one, such as a formula: coloured by their mean, it stands for the least sure. */
  mark(element, from, to) {
    const numbers = [];
    for (let index = this.#indexAt(from); index < this.ends.length && (index === 0 ? 0 : this.ends[index - 1]) < to; index++) {
      numbers.push(this.numbers[index]);
    }
    if (!numbers.length) return;
    const logprob = (number) => this.tokens[number].logprob;
    const mean = numbers.reduce((sum, number) => sum + logprob(number), 0) / numbers.length;
    element.classList.add("token", `s${step(mean)}`);
    element.tabIndex = -1;
    element.dataset.t = numbers.reduce((worst, number) => (logprob(number) < logprob(worst) ? number : worst));
  }
}

/** The bare text with a span per token, as a block: nothing of it is formatted. */
export function plain(region) {
  const block = make("pre", { class: "plain" });
  region.paint(block, region.text, 0);
  return block;
}
