// An answer's text as it grows. A block that has ended is built once; only the open end is built again.

import { frame } from "./code.js";
import { make } from "./dom.js";
import { isOpenMath } from "./math.js";
import { Builder, parse } from "./markdown.js";

const MAX_OPEN = 3000; // characters of the open end: what is built again with each render
const OPEN_ITEMS = 3; // a list, or a table, with more items than this is open at its last one only
const MAX_REBUILT = 8000; // characters of a block of code that is built anew, with its colours, once it has ended
const STEP = 1000; // characters that are built at once; more come with the next frame
const CHUNK_LINES = 40; // lines of code that are laid out together
const FENCE = /^ {0,3}(`{3,}|~{3,})([^\n]*)\n/;

export class Prose {
  constructor(element, region) {
    this.element = element;
    this.region = region;
    this.clear();
    this.element.classList.add("prose");
  }

  clear() {
    this.element.replaceChildren();
    this.seen = 0; // characters that are shown
    this.open = 0; // where the open end begins
    this.tail = []; // its elements
    this.host = null; // the list or table that the open end's first items belong to
    this.carry = ""; // a table's head, which its later rows need to be read as rows
    this.fence = null; // a long block of code, to which text is only appended
  }

  /**
   * Show what the region has, as far as it gets in `budget` ms. `isFinal`: nothing more will come.
   * Returns true when all is shown.
   */
  render(isFinal = false, budget = Infinity) {
    const end = performance.now() + budget;
    do {
      const total = this.region.text.length;
      this.text = this.region.text.slice(0, (this.seen = Math.min(total, this.seen + STEP)));
      this.#step(isFinal && this.seen === total);
    } while (this.seen < this.region.text.length && performance.now() < end);
    return this.seen === this.region.text.length;
  }

  #step(isFinal) {
    if (this.fence && !this.#growFence(isFinal)) return;
    for (const element of this.tail) element.remove();
    this.tail = [];
    while (this.#advance(isFinal));
  }

  /** Build the open end. Returns true if a part of it has been closed only because it was too long. */
  #advance(isFinal) {
    const source = this.carry + this.text.slice(this.open);
    const base = this.open - this.carry.length;
    const tokens = parse(source);
    const builder = new Builder(this.region, source, base, this.carry.length);
    let last = tokens.findLastIndex(({ type }) => type !== "space");
    const math = tokens.findIndex(({ raw }) => isOpenMath(raw));
    if (math >= 0 && source.length < MAX_OPEN) last = math;
    if (last < 0) return false;
    const isRestOpen = !isFinal;
    const closed = isRestOpen ? tokens.slice(0, last) : tokens;
    for (const token of closed) this.#emit(builder, token);
    if (!isRestOpen) {
      this.open = this.text.length;
      this.#leaveHost();
      return false;
    }
    const start = base + closed.reduce((sum, { raw }) => sum + raw.length, 0);
    if (closed.length) this.#moveTo(start);
    return this.#openEnd(builder, tokens.slice(last), start);
  }

  #moveTo(offset) {
    this.open = offset;
    this.carry = "";
  }

  #openEnd(builder, tokens, start) {
    const [token] = tokens;
    if (token.type === "list" && token.items.length > OPEN_ITEMS && token.raw.endsWith(token.items.at(-1).raw) && token.items.at(-1).text) return this.#splitList(builder, token, start);
    if (token.type === "table" && token.rows.length > OPEN_ITEMS) return this.#splitTable(builder, token, start);
    if (token.raw.length > MAX_OPEN && tokens.length === 1) {
      if (token.type === "code" && FENCE.test(token.raw)) return this.#startFence(token, start);
      return this.#cut(start);
    }
    const host = this.host;
    this.tail = tokens.flatMap((each) => this.#emit(builder, each));
    this.host = host; // the open end may still turn out to be something else
    return false;
  }

  /** Append a block, or a list's items or a table's rows to the one that they continue. Returns what was appended. */
  #emit(builder, token) {
    if (token.type === "space") return [];
    const host = this.host;
    this.host = null;
    if (host?.type === token.type && host.ordered === token.ordered) {
      const more = token.type === "list" ? builder.items(token.items, builder.range) : builder.rows(token.rows, builder.range);
      host.element.append(...more);
      this.host = host;
      return more;
    }
    const element = builder.block(token);
    if (!element) return [];
    this.element.append(element);
    return [element];
  }

  #leaveHost() {
    this.host = null;
    this.carry = "";
  }

  #splitList(builder, token, start) {
    const done = { ...token, items: token.items.slice(0, -1) };
    const [first] = this.#emit(builder, done);
    this.host ??= { type: "list", ordered: token.ordered, element: first };
    this.#moveTo(start + token.raw.length - token.items.at(-1).raw.length);
    return true;
  }

  #splitTable(builder, token, start) {
    const done = { ...token, rows: token.rows.slice(0, -1) };
    const [first] = this.#emit(builder, done);
    this.host ??= { type: "table", ordered: token.ordered, element: first.querySelector("tbody") };
    const rows = token.raw.trimEnd();
    const head = token.raw.split("\n", 2).join("\n") + "\n";
    this.open = start + rows.lastIndexOf("\n") + 1;
    this.carry = head;
    return true;
  }

  /** Close what is there of a block that is too long, at the end of a line, or else of a word. */
  #cut(from) {
    const start = Math.max(from, this.open); // a table's head has been shown
    const text = this.text.slice(start);
    const line = text.lastIndexOf("\n", text.length - 2) + 1;
    const end = line > MAX_OPEN / 2 ? line : text.lastIndexOf(" ") + 1 || text.length;
    this.#leaveHost();
    const part = text.slice(0, end);
    const whole = new Builder(this.region, part, start);
    for (const token of parse(part)) this.#emit(whole, token);
    this.#leaveHost();
    this.open = start + end;
    return true;
  }

  #startFence(token, start) {
    const [head, mark, info] = FENCE.exec(token.raw);
    const { element, code } = frame(info);
    this.#leaveHost();
    this.element.append(element);
    this.open = start;
    this.fence = { element, code, lines: 0, at: start + head.length, end: new RegExp(`^ {0,3}${mark[0]}{${mark.length},}[ \\t]*$`) };
    return this.#growFence(false);
  }

  /** Append whole lines to the code. Returns true once it has ended: it is then built anew, with its colours. */
  #growFence(isFinal) {
    const { text, fence } = this;
    for (let end; (end = text.indexOf("\n", fence.at)) >= 0; fence.at = end + 1) {
      const line = text.slice(fence.at, end);
      if (fence.end.test(line)) return this.#endFence(end + 1);
      if (fence.lines++ % CHUNK_LINES === 0) fence.chunk = fence.code.appendChild(make("span", { class: "lines" }));
      this.region.paint(fence.chunk, `${line}\n`, fence.at);
    }
    if (isFinal) return this.#endFence(text.length, true);
    return false;
  }

  #endFence(end, isFinal = false) {
    const { element, code, at } = this.fence;
    const source = this.text.slice(this.open, end);
    this.fence = null;
    if (source.length <= MAX_REBUILT) {
      element.remove();
      const builder = new Builder(this.region, source, this.open);
      for (const token of parse(source)) this.#emit(builder, token);
    } else if (at < end && isFinal) {
      this.region.paint(code, this.text.slice(at, end), at);
    }
    this.#leaveHost();
    this.open = end;
    return true;
  }
}
