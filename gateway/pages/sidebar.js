// The list of conversations: search, rename, delete, export.

import { $, askFirst, download, isSending, make } from "./dom.js";
import * as store from "./store.js";
import { path, titleOf, toMarkdown } from "./tree.js";

const SHOWN = 300;

const fileName = (chat, ending) => `${(chat.title || titleOf(chat)).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "chat"}.${ending}`;

export const exportMarkdown = (chat) => download(fileName(chat, "md"), toMarkdown(chat, path(chat)), "text/markdown");
export const exportJson = (chat) => download(fileName(chat, "json"), JSON.stringify(chat, null, 1), "application/json");

function day(time) {
  const days = Math.floor((new Date().setHours(24, 0, 0, 0) - time) / 86_400_000);
  if (days < 1) return "Today";
  if (days < 2) return "Yesterday";
  return days < 8 ? "This week" : new Date(time).toLocaleDateString("en", { month: "long", year: "numeric" });
}

export class Sidebar {
  /** `hooks`: current() is the open conversation; open(id), removed(id) and renamed(id, title) are called. */
  constructor(hooks) {
    this.hooks = hooks;
    this.entries = [];
    $("search").addEventListener("input", () => this.show());
    $("menu").addEventListener("click", () => this.toggle());
    $("scrim").addEventListener("click", () => this.toggle(false));
    const wide = matchMedia("(min-width: 901px)");
    const adapt = () => this.toggle(wide.matches);
    wide.addEventListener("change", adapt);
    adapt();
    document.addEventListener("visibilitychange", () => document.hidden || this.refresh());
  }

  get isOverlay() {
    return !matchMedia("(min-width: 901px)").matches;
  }

  /** True while it covers the conversation. */
  get isInTheWay() {
    return this.isOverlay && !$("sidebar").hidden;
  }

  toggle(isOpen = $("sidebar").hidden) {
    $("sidebar").hidden = !isOpen;
    $("scrim").hidden = !(isOpen && this.isOverlay);
    $("menu").setAttribute("aria-expanded", isOpen);
    if (isOpen && this.isOverlay) $("new-chat").focus(); // not the search: phones would open their keyboard
  }

  async refresh() {
    this.entries = await store.list();
    this.show();
  }

  show() {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.entries.filter(({ text }) => words.every((word) => text.includes(word)));
    const items = [];
    let last = null;
    for (const entry of found.slice(0, SHOWN)) {
      const name = day(entry.updated);
      if (name !== last) items.push(make("li", { class: "day" }, (last = name)));
      items.push(this.#item(entry));
    }
    if (found.length > SHOWN) items.push(make("li", { class: "day" }, `${found.length - SHOWN} more: search for them`));
    if (!found.length) items.push(make("li", { class: "none" }, words.length ? "Nothing found." : "No conversations yet."));
    $("chats").replaceChildren(...items);
  }

  #item(entry) {
    const isCurrent = entry.id === this.hooks.current()?.id;
    const name = make("button", { type: "button", class: "name", "aria-current": isCurrent ? "true" : null, onclick: () => this.#open(entry.id) }, entry.title || "New chat");
    const label = (what) => ({ type: "button", class: "quiet", title: what, "aria-label": `${what}: ${entry.title}` });
    const tools = make("span", { class: "tools" },
      make("button", { ...label("Rename"), onclick: () => this.#rename(entry, item) }, "✎"),
      askFirst(make("button", label("Delete"), "×"), "Delete?", () => this.#remove(entry)));
    const item = make("li", { class: "chat-item" }, name, tools);
    return item;
  }

  #open(id) {
    this.hooks.open(id);
    if (this.isOverlay) this.toggle(false);
  }

  #rename(entry, item) {
    const input = make("input", { "aria-label": "New title", value: entry.title });
    let isDone = false;
    const finish = async (isKept) => {
      if (isDone) return;
      isDone = true;
      const title = input.value.trim();
      if (isKept && title && title !== entry.title) await this.hooks.renamed(entry.id, title);
      await this.refresh();
    };
    input.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (isSending(event)) finish(true);
      if (event.key === "Escape") finish(false);
    });
    input.addEventListener("blur", () => finish(true));
    item.replaceChildren(input);
    input.focus();
    input.select();
  }

  async #remove(entry) {
    await store.remove(entry.id);
    store.tell(entry.id);
    this.hooks.removed(entry.id);
    await this.refresh();
  }
}
