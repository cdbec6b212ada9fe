// Tokens with their confidence: spans in a text, and a tooltip with the alternatives of a token.

import { make } from "./dom.js";

const STEPS = [0.9, 0.7, 0.4, 0.15];

/** Confidence step of a token: 0 is the most confident, 4 the least. */
export const step = (logprob) => {
  const index = STEPS.findIndex((least) => Math.exp(logprob) >= least);
  return index < 0 ? STEPS.length : index;
};

export const percent = (probability) =>
  probability >= 0.9995 ? "100 %" : `${(probability * 100).toFixed(probability < 0.0995 ? 2 : 1)} %`;

/** exp of the mean log-prob, or null without tokens. */
export const confidence = (tokens) =>
  tokens.length ? Math.exp(tokens.reduce((sum, token) => sum + token.logprob, 0) / tokens.length) : null;

const visible = (text) => (text === "" ? "(no text)" : text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣"));

/** Shows one token at a time; `element` is the tooltip. */
export class Tip {
  constructor(element) {
    this.element = element;
    this.owner = null;
    addEventListener("scroll", () => this.hide(), true);
  }

  show(span, token) {
    this.hide();
    this.owner = span;
    span.setAttribute("aria-describedby", this.element.id);
    this.element.replaceChildren(...describe(token));
    this.element.hidden = false;
    const spot = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const { width, height } = this.element.getBoundingClientRect();
    const below = spot.bottom + 6 + height < innerHeight ? spot.bottom + 6 : Math.max(8, spot.top - 6 - height);
    this.element.style.top = `${below}px`;
    this.element.style.left = `${Math.max(8, Math.min(spot.left, innerWidth - width - 8))}px`;
  }

  hide() {
    this.owner?.removeAttribute("aria-describedby");
    this.owner = null;
    this.element.hidden = true;
  }
}

function describe(token) {
  const listed = token.top.some((other) => other.text === token.text) ? token.top : [token, ...token.top];
  const row = (each) =>
    make("tr", { class: each.text === token.text ? "chosen" : "" },
      make("td", {}, visible(each.text)), make("td", {}, percent(Math.exp(each.logprob))), make("td", {}, each.logprob.toFixed(2)));
  return [
    make("div", { class: "head" }, make("code", {}, visible(token.text)), make("span", {}, percent(Math.exp(token.logprob)))),
    make("table", {},
      make("tr", {}, make("th", { scope: "col" }, "It considered"), make("th", { scope: "col" }, "prob."), make("th", { scope: "col" }, "log-prob")),
      ...listed.map(row)),
  ];
}

/** A text of tokens. It is one tab stop; arrow keys move from token to token. */
export class TokenText {
  constructor(element, tip) {
    this.element = element;
    this.tokens = [];
    this.tip = tip;
    this.spans = new Map();
    element.addEventListener("pointerover", (event) => this.#point(event.target));
    element.addEventListener("pointerout", () => tip.hide());
    element.addEventListener("focusin", (event) => this.#point(event.target));
    element.addEventListener("focusout", () => tip.hide());
    element.addEventListener("keydown", (event) => this.#move(event));
  }

  get text() {
    return this.element.textContent;
  }

  add(text, token) {
    if (!token) {
      this.element.append(text);
      return;
    }
    this.tokens.push(token);
    if (!text) return; // a part of a character, or of a stop string: the text comes with a later token
    const span = make("span", { class: `token s${step(token.logprob)}`, tabindex: this.spans.size ? -1 : 0 }, text);
    this.spans.set(span, token);
    this.element.append(span);
  }

  #point(target) {
    const token = this.spans.get(target);
    if (token) this.tip.show(target, token);
  }

  #move(event) {
    const ways = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" };
    const ends = { Home: "firstElementChild", End: "lastElementChild" };
    const to = event.key in ways ? event.target[ways[event.key]] : event.key in ends ? this.element[ends[event.key]] : null;
    if (event.key === "Escape") this.tip.hide();
    if (!to) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }
}
