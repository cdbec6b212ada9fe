// A token's alternatives: a tip while it is pointed at, and a panel, once it is chosen, that can go on from another one.

import { make } from "./dom.js";

export const percent = (probability) =>
  probability >= 1 ? "100 %" : `${Math.min(probability * 100, 99.9).toFixed(probability < 0.0995 ? 2 : 1)} %`;

/** exp of the mean log-prob, or null without tokens. */
export const confidence = (tokens) =>
  tokens.length ? Math.exp(tokens.reduce((sum, token) => sum + token.logprob, 0) / tokens.length) : null;

const visible = (text) => (text === "" ? "(no text)" : text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣"));

function describe(token, choose) {
  const same = (other) => (token.id === undefined || other.id === undefined ? other.text === token.text : other.id === token.id);
  const listed = token.top.some(same) ? token.top : [token, ...token.top];
  const name = (each) =>
    choose && !same(each) && each.text !== "" && each.id !== undefined
      ? make("button", { type: "button", title: "Go on from this token instead", onclick: () => choose(each) }, visible(each.text))
      : make("span", {}, visible(each.text));
  const row = (each) =>
    make("tr", { class: same(each) ? "chosen" : "" },
      make("td", {}, name(each)), make("td", {}, percent(Math.exp(each.logprob))), make("td", {}, each.logprob.toFixed(2)));
  return [
    make("div", { class: "head" }, make("code", {}, visible(token.text)), make("span", {}, percent(Math.exp(token.logprob)))),
    make("table", {},
      make("tr", {}, make("th", { scope: "col" }, "It considered"), make("th", { scope: "col" }, "prob."), make("th", { scope: "col" }, "log-prob")),
      ...listed.map(row)),
  ];
}

function place(element, span) {
  const spot = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const { width, height } = element.getBoundingClientRect();
  const below = spot.bottom + 6 + height < innerHeight ? spot.bottom + 6 : Math.max(8, spot.top - 6 - height);
  element.style.top = `${below}px`;
  element.style.left = `${Math.max(8, Math.min(spot.left, innerWidth - width - 8))}px`;
}

/** Shows the alternatives of one token at a time. `tip` follows the pointer or focus; `panel` stays and has buttons. */
export class Alternatives {
  constructor(tip, panel) {
    Object.assign(this, { tip, panel, owner: null, origin: null });
    addEventListener("scroll", () => this.hide(), true);
    panel.addEventListener("focusout", (event) => panel.contains(event.relatedTarget) || this.close());
    panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.close(true);
    });
    document.addEventListener("pointerdown", (event) => panel.contains(event.target) || this.close());
  }

  show(span, token) {
    this.hide();
    if (!this.panel.hidden) return;
    this.owner = span;
    span.setAttribute("aria-describedby", this.tip.id);
    this.tip.replaceChildren(...describe(token, null));
    this.tip.hidden = false;
    place(this.tip, span);
  }

  hide() {
    this.owner?.removeAttribute("aria-describedby");
    this.owner = null;
    this.tip.hidden = true;
  }

  /** Open the panel; `choose` is called with the alternative from which to go on. */
  open(span, token, choose) {
    this.hide();
    this.origin = span;
    const pick = (other) => (this.close(), choose(other));
    const hint = choose ? "Choose one to go on from there." : "While the model answers, they can only be looked at.";
    this.panel.replaceChildren(...describe(token, choose && pick), make("p", {}, hint));
    this.panel.hidden = false;
    place(this.panel, span);
    (this.panel.querySelector("button") ?? this.panel).focus({ preventScroll: true });
  }

  close(isBack = false) {
    if (this.panel.hidden) return;
    this.panel.hidden = true;
    if (isBack) this.origin?.focus({ preventScroll: true });
  }
}

/** Lets people go through the tokens of an element: one tab stop, arrow keys from token to token, Enter or a click to open. */
export class TokenKeys {
  constructor(element, alternatives, tokenOf, choose) {
    Object.assign(this, { element, alternatives, tokenOf, choose });
    element.addEventListener("pointerover", (event) => this.#point(event.target));
    element.addEventListener("pointerout", () => alternatives.hide());
    element.addEventListener("focusin", (event) => this.#point(event.target));
    element.addEventListener("focusout", () => alternatives.hide());
    element.addEventListener("click", (event) => this.#open(event.target));
    element.addEventListener("keydown", (event) => this.#press(event));
  }

  /** Make one of the tokens the tab stop. */
  ready() {
    if (!this.element.querySelector('.token[tabindex="0"]')) this.element.querySelector(".token")?.setAttribute("tabindex", 0);
  }

  #span(target) {
    return target.closest?.(".token");
  }

  #point(target) {
    const span = this.#span(target);
    if (span) this.alternatives.show(span, this.tokenOf(Number(span.dataset.t)));
  }

  #open(target) {
    const span = this.#span(target);
    if (!span || target.closest("a, button") || !getSelection().isCollapsed) return;
    const number = Number(span.dataset.t);
    const choose = this.choose(number);
    this.alternatives.open(span, this.tokenOf(number), choose);
  }

  #press(event) {
    if (event.key === "Escape") this.alternatives.hide();
    const span = this.#span(event.target);
    if (!span || event.target !== span) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.#open(span);
    }
    const spans = ["ArrowRight", "ArrowLeft", "Home", "End"].includes(event.key) ? [...this.element.querySelectorAll(".token")] : [];
    if (!spans.length) return;
    const at = spans.indexOf(span);
    const to = spans[{ ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 }[event.key]];
    event.preventDefault();
    if (!to) return;
    span.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }
}
