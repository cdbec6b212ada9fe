// Formulas, by KaTeX, which is loaded with the first one: until then, and where it fails, the TeX is shown.

import { make } from "./dom.js";

const OPTIONS = { throwOnError: true, trust: false, strict: "ignore", output: "html", maxSize: 40, maxExpand: 500 };
const MAX_TEX = 5000;
let loading = null;

function load() {
  loading ??= import("./vendor/katex/katex.min.js").then(() => {
    document.head.append(make("link", { rel: "stylesheet", href: "/pages/vendor/katex/katex.min.css" }));
  });
  return loading;
}

function typeset(element, tex, displayMode) {
  try {
    globalThis.katex.render(tex, element, { ...OPTIONS, displayMode });
  } catch {
    element.textContent = tex;
    element.classList.add("broken");
  }
}

/** An element with a formula. */
export function formulaElement(tex, isDisplay, tag) {
  const element = make(tag, { class: `math${isDisplay ? " display" : ""}`, role: "math", "aria-label": tex }, tex);
  if (tex.length > MAX_TEX) return element;
  if (globalThis.katex) typeset(element, tex, isDisplay);
  else load().then(() => typeset(element, tex, isDisplay), () => {});
  return element;
}

const token = (match, isDisplay) => match && { type: "math", raw: match[0], tex: (match[1] ?? match[2]).trim(), display: isDisplay };
const BLOCK = /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n|$)/;
const DISPLAY = /^(?:\$\$([^$]+?)\$\$|\\\[([\s\S]+?)\\\])/;
// As pandoc: no space inside the dollars, and no digit behind, so that $5 and $10 are prices.
const INLINE = /^(?:\$(?![\s$])((?:\\.|[^\\$\n])+?)(?<![\s\\])\$(?![\d$])|\\\(([\s\S]+?)\\\))/;
const start = (source) => {
  const index = source.search(/\$|\\[([]/);
  return index < 0 ? undefined : index;
};

/** Extensions for marked: $$...$$, \[...\], $...$ and \(...\). */
export const mathExtensions = [
  { name: "math", level: "block", start: (source) => source.match(/(?:^|\n)(?:\$\$|\\\[)/)?.index, tokenizer: (source) => token(BLOCK.exec(source), true) || undefined },
  { name: "math", level: "inline", start, tokenizer: (source) => token(DISPLAY.exec(source), true) || token(INLINE.exec(source), false) || undefined },
];

/** True if a block of the source may be a formula whose end is still to come. */
export const isOpenMath = (raw) => /^(?:\$\$(?![\s\S]*\$\$)|\\\[(?![\s\S]*\\\]))/.test(raw);
