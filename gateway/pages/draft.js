// An answer as it is received: its tokens, and the texts of its reasoning and of what is said.

import { Region } from "./region.js";

const [OPEN, CLOSE] = ["<think>", "</think>"];

/** How many characters at the end may be the beginning of </think>. */
const markAtEnd = (text) => [...CLOSE].findLastIndex((_, size) => size === 0 || text.endsWith(CLOSE.slice(0, size)));

/** Splits a raw text into reasoning and answer. `state` is start, thinking or answer; what may begin a mark is held back. */
export class Splitter {
  constructor(state) {
    this.state = state;
    this.held = "";
    this.isBlank = false; // white space between reasoning and answer is dropped
  }

  push(text, isLast = false) {
    let rest = this.held + text;
    this.held = "";
    if (this.state === "start") {
      const first = rest.trimStart();
      if (OPEN.startsWith(first) && !isLast) return (this.held = rest), ["", ""];
      this.state = first.startsWith(OPEN) ? "thinking" : "answer";
      if (this.state === "thinking") rest = first.slice(OPEN.length).trimStart();
    }
    if (this.state === "answer") return ["", this.#answer(rest)];
    const end = rest.indexOf(CLOSE);
    if (end >= 0) {
      [this.state, this.isBlank] = ["answer", true];
      return [rest.slice(0, end).trimEnd(), this.#answer(rest.slice(end + CLOSE.length))];
    }
    const size = isLast ? 0 : markAtEnd(rest);
    if (size > 0) [rest, this.held] = [rest.slice(0, -size), rest.slice(-size)];
    return [rest, ""];
  }

  #answer(text) {
    const shown = this.isBlank ? text.trimStart() : text;
    this.isBlank &&= !shown;
    return shown;
  }
}

const entry = ({ token, token_id: id, logprob }) => ({ text: token, id, logprob });

export class Draft {
  constructor({ tokens = [], ids = [], thoughts = null, content = null } = {}) {
    this.tokens = tokens;
    this.ids = ids;
    this.thoughts = Object.assign(new Region(tokens), thoughts);
    this.content = Object.assign(new Region(tokens), content);
    this.splitter = null;
  }

  /** What is stored of it. */
  get stored() {
    const region = ({ text, numbers, ends }) => ({ text, numbers, ends });
    return { tokens: this.tokens, ids: this.ids, thoughts: region(this.thoughts), content: region(this.content), changed: Date.now() };
  }

  /** The state in which token `number` was generated, for a Splitter. */
  stateAt(number) {
    const before = this.tokens.slice(0, number).map(({ text }) => text).join("");
    if (!this.thoughts.text) return number === 0 ? "start" : "answer";
    if (number === 0 && this.tokens[0].text.includes(OPEN)) return "start";
    return before.includes(CLOSE) ? "answer" : "thinking";
  }

  /** A copy of the tokens before `number`, then `other` in its place. */
  branch(number, other) {
    const tokens = this.tokens.slice(0, number);
    const cut = ({ numbers, ends, text }) => {
      const size = numbers.findIndex((each) => each >= number);
      const kept = size < 0 ? numbers.length : size;
      return { numbers: numbers.slice(0, kept), ends: ends.slice(0, kept), text: text.slice(0, kept ? ends[kept - 1] : 0) };
    };
    const copy = new Draft({ tokens, ids: this.ids.slice(0, number), thoughts: cut(this.thoughts), content: cut(this.content) });
    copy.splitter = new Splitter(this.stateAt(number));
    copy.ids.push(other.id);
    copy.#add({ ...other, top: this.tokens[number].top }, other.text);
    copy.finish();
    return copy;
  }

  /** Prepare to take a completion that goes on behind the last token, which may have been within a mark. */
  goOn() {
    const isStart = !this.thoughts.text && OPEN.startsWith(this.content.text.trimStart());
    const state = isStart ? "start" : this.stateAt(this.tokens.length);
    this.splitter = new Splitter(state);
    this.splitter.isBlank = Boolean(this.thoughts.text) && !this.content.text;
    if (state === "start") this.splitter.held = this.content.drop(this.content.text.length);
    if (state === "thinking") this.splitter.held = this.thoughts.drop(markAtEnd(this.thoughts.text));
  }

  /** Take a chunk of a chat's stream. Returns true if it had something. */
  takeChat({ delta, logprobs, token_ids: ids = [] }) {
    const tokens = (logprobs?.content ?? []).map((each) => ({ ...entry(each), top: each.top_logprobs.map(entry) }));
    this.ids.push(...ids);
    const first = this.tokens.length;
    this.tokens.push(...tokens);
    this.#spread(this.thoughts, delta.reasoning_content ?? "", tokens, first);
    this.#spread(this.content, delta.content ?? "", tokens, first);
    return Boolean(ids.length || tokens.length || delta.content || delta.reasoning_content);
  }

  /** Take a chunk of a completion's stream. */
  takeCompletion({ text, logprobs, token_ids: ids = [] }) {
    const tokens = (logprobs?.tokens ?? []).map((each, index) => ({
      text: each,
      id: undefined,
      logprob: logprobs.token_logprobs[index],
      top: logprobs.top_tokens?.[index] ?? [],
    }));
    this.ids.push(...ids);
    const first = this.tokens.length;
    this.tokens.push(...tokens);
    tokens.forEach((token, index) => (token.id = this.ids[first + index]));
    const [thoughts, content] = this.splitter.push(text);
    this.#spread(this.thoughts, thoughts, tokens, first);
    this.#spread(this.content, content, tokens, first);
    return Boolean(ids.length || tokens.length || text);
  }

  /** Add what a splitter still holds back. */
  finish() {
    const [thoughts, content] = this.splitter?.push("", true) ?? ["", ""];
    this.thoughts.add(thoughts, null);
    this.content.add(content, null);
    this.splitter = null;
  }

  #add(token, text) {
    this.tokens.push(token);
    const [thoughts, content] = this.splitter.push(text);
    this.thoughts.add(thoughts, this.tokens.length - 1);
    this.content.add(content, this.tokens.length - 1);
  }

  /** Add a text of several tokens: to each its own if their texts make it up, else all to the last. */
  #spread(region, text, tokens, first) {
    if (!text) return;
    const isExact = tokens.reduce((sum, token) => sum + token.text, "") === text;
    if (isExact) tokens.forEach((token, index) => region.add(token.text, first + index));
    else region.add(text, tokens.length ? first + tokens.length - 1 : null);
  }
}
