// Markdown as elements. The parser is marked's; elements are made one by one from what it finds, and a model's text is only
// ever inserted as text. No string of HTML is made, so there is nothing to sanitise: raw HTML is shown as it was written.
//
// Each piece of text is located in the source, so that it can be painted with the tokens that it came from.

import { make } from "./dom.js";
import { codeBlock } from "./code.js";
import { formulaElement, mathExtensions } from "./math.js";
import { Marked } from "./vendor/marked.esm.js";

const marked = new Marked({ gfm: true, extensions: mathExtensions });
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", mdash: "—", ndash: "–", hellip: "…", times: "×", rarr: "→" };
const FENCE_LINE = /^ {0,3}(?:`{3,}|~{3,})[^\n]*\n/;
const ITEM_MARK = /^ *(?:[-*+]|\d{1,9}[.)])(?: +\[[ xX]\])?(?=\s)/;
const DELIMITER_ROW = /^[^\n]*\n[^\n]*\n/; // with what is left of the head's line
const ENTITY = /&(?:#(\d{1,7})|#x([\da-f]{1,6})|([a-z]{2,8}));/gi;

/** The blocks of a source. Their `raw` texts, joined, are the source. */
export const parse = (source) => marked.lexer(source.replaceAll("\r", " "));

/** A stretch of the source in which the next pieces are looked for, from `at` on. */
class Range {
  constructor(source, at, end, base) {
    Object.assign(this, { source, at, end, base });
  }

  /** Take the next `text`; null if it is not there as such, because marks were removed inside it. */
  take(text) {
    const found = this.source.indexOf(text, this.at);
    if (found < 0 || found + text.length > this.end) return null;
    this.at = found + text.length;
    return new Range(this.source, found, this.at, this.base);
  }

  /** Step over the marks at its beginning, which are not shown: a text of the same characters may follow. */
  skip(marks) {
    const [mark] = marks.exec(this.source.slice(this.at, this.end)) ?? [""];
    this.at += mark.length;
    return this;
  }
}

/** Writes one text, possibly in parts, each line where the source has it. */
class Writer {
  constructor(text, range, region) {
    const whole = range.take(text);
    let at = 0;
    this.lines = text.split("\n").map((line) => {
      const found = whole ? whole.at + at : line ? range.take(line)?.at ?? null : null;
      at += line.length + 1;
      return found === null ? null : found + range.base;
    });
    [this.region, this.line, this.column] = [region, 0, 0];
  }

  write(parent, text) {
    for (const part of text.match(/[^\n]*\n|[^\n]+/g) ?? []) {
      const start = this.lines[this.line] ?? null;
      this.region.paint(parent, part, start === null ? null : start + this.column);
      if (part.endsWith("\n")) [this.line, this.column] = [this.line + 1, 0];
      else this.column += part.length;
    }
  }
}

/** Builds elements for the blocks of `source`, which begins at `base` of the region. What is before `at` has been shown. */
export class Builder {
  constructor(region, source, base, at = 0) {
    this.region = region;
    this.range = new Range(source.replaceAll("\r", " "), at, source.length, base);
  }

  /** The element of a block; null if it shows nothing. */
  block(token, range = this.range) {
    const within = range.take(token.raw) ?? range;
    return this[BLOCKS[token.type] ?? "other"](token, within);
  }

  blocks(parent, tokens, range) {
    for (const token of tokens) {
      const element = this.block(token, range);
      if (element) parent.append(element);
    }
    return parent;
  }

  nothing() {
    return null;
  }

  other(token, range) {
    return this.text(make("p", { class: "raw" }), token.raw.trimEnd(), range);
  }

  paragraph(token, range) {
    return this.inline(make("p"), token.tokens, range);
  }

  heading(token, range) {
    return this.inline(make(`h${Math.min(6, token.depth + 1)}`, { class: `h${token.depth}` }), token.tokens, range);
  }

  loose(token, range) {
    return this.inline(make("span"), token.tokens ?? [{ type: "text", raw: token.raw, text: token.text }], range);
  }

  rule() {
    return make("hr");
  }

  quote(token, range) {
    return this.blocks(make("blockquote"), token.tokens, range);
  }

  code(token, range) {
    return codeBlock(token, new Writer(token.text, range.skip(FENCE_LINE), this.region));
  }

  math(token, range) {
    return this.formula(token, range, "div");
  }

  formula(token, range, tag) {
    const element = formulaElement(token.tex, token.display, tag);
    this.region.mark(element, range.base + range.at, range.base + range.end);
    return element;
  }

  list(token, range) {
    const list = make(token.ordered ? "ol" : "ul", { start: token.ordered && token.start !== 1 ? token.start : null });
    list.append(...this.items(token.items, range));
    return list;
  }

  items(items, range) {
    return items.map((item) => {
      const box = item.task ? [make("input", { type: "checkbox", disabled: true, checked: item.checked, "aria-label": item.checked ? "done" : "to do" })] : [];
      const within = range.take(item.raw)?.skip(ITEM_MARK) ?? range;
      return this.blocks(make("li", { class: item.task ? "task" : null }, ...box), item.tokens.filter(({ type }) => type !== "checkbox"), within);
    });
  }

  table(token, range) {
    const head = make("tr", {}, ...token.header.map((cell) => this.cell("th", cell, range)));
    const body = make("tbody", {}, ...this.rows(token.rows, range.skip(DELIMITER_ROW)));
    const table = make("table", {}, make("thead", {}, head), body);
    return make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, table);
  }

  rows(rows, range) {
    return rows.map((row) => make("tr", {}, ...row.map((cell) => this.cell("td", cell, range))));
  }

  cell(tag, cell, range) {
    return this.inline(make(tag, { class: cell.align, scope: tag === "th" ? "col" : null }), cell.tokens, range);
  }

  inline(parent, tokens, range) {
    for (const token of tokens) {
      const within = range.take(token.raw) ?? range;
      if (token.type === "br" || /^<br\s*\/?>$/i.test(token.raw)) parent.append(make("br"));
      else if (token.type === "math") parent.append(this.formula(token, within, "span"));
      else if (token.type === "link") parent.append(this.link(token, within));
      else if (token.type === "image") parent.append(this.link({ ...token, tokens: [{ type: "text", raw: token.text, text: token.text || token.href }] }, within));
      else if (token.type === "codespan") this.text(parent.appendChild(make("code")), token.text, within);
      else if (token.type in SPANS) parent.append(this.inline(make(SPANS[token.type]), token.tokens, within));
      else if (token.tokens) this.inline(parent, token.tokens, within);
      else if (token.type === "html" || token.type === "escape") this.text(parent, token.text, within);
      else this.decoded(parent, token.text, within);
    }
    return parent;
  }

  /** A link leaves the page in a tab of its own. Other schemes than the web's and mail's are shown as text. */
  link(token, range) {
    const isSafe = /^(https?:|mailto:)/i.test(token.href.trim());
    const attributes = isSafe ? { href: token.href.trim(), target: "_blank", rel: "noopener noreferrer nofollow", title: token.href } : {};
    return this.inline(make(isSafe ? "a" : "span", attributes), token.tokens, range);
  }

  text(parent, text, range) {
    new Writer(text, range, this.region).write(parent, text);
    return parent;
  }

  /** Text with character references, such as &amp;amp;, which it shows as characters. */
  decoded(parent, text, range) {
    let done = 0;
    for (const match of text.matchAll(ENTITY)) {
      const [whole, decimal, hex, name] = match;
      const code = decimal ? Number(decimal) : parseInt(hex, 16);
      const character = name ? ENTITIES[name] : code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : null;
      if (!character) continue;
      this.text(parent, text.slice(done, match.index), range);
      const found = range.take(whole);
      this.region.paint(parent, character, found && found.at + range.base);
      done = match.index + whole.length;
    }
    if (done < text.length) this.text(parent, text.slice(done), range);
  }
}

const BLOCKS = {
  space: "nothing", def: "nothing", paragraph: "paragraph", heading: "heading", text: "loose", hr: "rule", blockquote: "quote",
  code: "code", list: "list", table: "table", math: "math",
};
const SPANS = { strong: "strong", em: "em", del: "del" };
