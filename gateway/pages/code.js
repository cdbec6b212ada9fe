// Blocks of code: highlighting, which is loaded with the first one, and a button that copies.

import { copyText, make } from "./dom.js";

const MAX_HIGHLIGHTED = 8000; // characters
let highlighter = null;
let loading = null;

/** Load the highlighter. Blocks that are built before it is there stay plain until they are built again. */
function load() {
  loading ??= import("./vendor/highlight.min.js").then((module) => {
    highlighter = module.default;
    dispatchEvent(new Event("highlighter"));
  }, () => {});
}

/** Write a tree of the highlighter: nodes have a scope, leaves are strings. */
function writeTree(parent, node, writer) {
  for (const child of node.children) {
    if (typeof child === "string") writer.write(parent, child);
    else {
      const [first, ...rest] = (child.scope ?? "").split(".");
      const names = child.scope ? [`hljs-${first}`, ...rest.map((name, index) => `${name}${"_".repeat(index + 1)}`)] : [];
      writeTree(parent.appendChild(make("span", { class: names.join(" ") })), child, writer);
    }
  }
}

function write(element, text, language, writer) {
  if (!language || text.length > MAX_HIGHLIGHTED) return writer.write(element, text);
  if (!highlighter) load();
  if (!highlighter?.getLanguage(language)) return writer.write(element, text);
  const tree = highlighter.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode;
  return writeTree(element, tree, writer);
}

/** The frame of a block: its language, a button that copies, and the code, which is still to be written. */
export function frame(info) {
  const language = (info ?? "").trim().split(/\s+/)[0].toLowerCase();
  const code = make("code", {});
  const copy = make("button", { type: "button", class: "quiet copy-code", onclick: () => copyText(copy, code.textContent) }, "Copy");
  const bar = make("div", { class: "code-bar" }, make("span", {}, language || "text"), copy);
  const pre = make("pre", { tabindex: 0, "aria-label": `Code${language ? `, ${language}` : ""}`, role: "group" }, code);
  return { element: make("div", { class: "code" }, bar, pre), code, language };
}

export function codeBlock(token, writer) {
  const { element, code, language } = frame(token.lang);
  write(code, token.text, language, writer);
  return element;
}
