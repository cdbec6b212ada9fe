// The turns of a conversation as elements, with what can be done with each.

import { AnswerView, isOpen } from "./answer.js";
import { askFirst, copyText, isSending, make } from "./dom.js";
import { childrenOf, pairOf, sizeOf } from "./tree.js";

const button = (label, onclick, attributes = {}) => make("button", { type: "button", class: "quiet", onclick, ...attributes }, label);

/** "2 / 3" with arrows, where there are several versions; null where there is one. */
function switcher(chat, node, actions) {
  const siblings = childrenOf(chat, node.parent).filter(({ role }) => role === node.role);
  const at = siblings.indexOf(node);
  if (siblings.length < 2) return [];
  const go = (index, label, sign) => button(sign, () => actions.show(siblings[index]), { disabled: !siblings[index], "aria-label": label, title: label });
  return [make("span", { class: "versions" }, go(at - 1, "Version before", "‹"), `${at + 1} / ${siblings.length}`, go(at + 1, "Next version", "›"))];
}

/** What others follow is not deleted by one press. */
function deletion(chat, node, actions) {
  const size = sizeOf(chat, node);
  const act = () => actions.remove(node);
  return size > 1 ? askFirst(button("Delete", null), `Delete ${size} messages?`, act) : button("Delete", act);
}

export function userTurn(chat, node, actions) {
  const said = make("div", { class: "text" });
  said.textContent = node.text;
  const copy = button("Copy", () => copyText(copy, node.text));
  const tools = make("div", { class: "actions" },
    copy, button("Edit", () => edit(item, node, actions)), deletion(chat, node, actions), ...switcher(chat, node, actions));
  const item = make("li", { class: "user", "data-node": node.id }, make("span", { class: "hidden" }, "You: "), said, tools);
  return item;
}

/** Change a message in place. Sending makes a new branch; the old one stays as another version. */
export function edit(item, node, actions) {
  const input = make("textarea", { "aria-label": "Edit the message", rows: Math.min(12, node.text.split("\n").length + 1) });
  input.value = node.text;
  const send = () => input.value.trim() && actions.edit(node, input.value.trim());
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape") (event.stopPropagation(), actions.render());
    if (!isSending(event)) return;
    event.preventDefault();
    send();
  });
  const tools = make("div", { class: "actions" }, button("Cancel", actions.render), make("button", { type: "button", class: "primary", onclick: send }, "Send"));
  item.replaceChildren(make("div", { class: "editor" }, input, tools));
  input.focus();
}

/** Buttons under an answer, as far as they make sense in its state. */
export function showActions(chat, view, actions, isPair = view.element.parentElement?.className === "pair") {
  const { node } = view;
  const copy = button("Copy", () => copyText(copy, node.content.text));
  const source = button("Tokens", () => {
    view.setPlain(!view.isPlain);
    source.setAttribute("aria-pressed", view.isPlain);
  }, { "aria-pressed": view.isPlain, title: "The text as the model wrote it, token by token" });
  const list = view.isRunning ? [] : [
    ...(node.ending === "error" ? [button("Retry", () => actions.retry(view), { class: "strong" })] : []),
    ...(isOpen(node) && node.ending !== "error" ? [button("Continue", () => actions.proceed(view), { class: "strong" })] : []),
    ...(isPair ? [button("Keep this one", () => actions.keep(node), { class: "strong" })] : []),
    ...(node.content.text ? [copy] : []),
    ...(node.ids.length || node.ending !== "error" ? [button("Regenerate", () => actions.regenerate(node))] : []),
    ...(node.tokens.length ? [source] : []),
    deletion(chat, node, actions),
    ...(isPair ? [] : switcher(chat, node, actions)),
  ];
  view.actions.replaceChildren(...list);
}

export class Turns {
  constructor(list, alternatives, actions) {
    Object.assign(this, { list, alternatives, actions, views: new Map() });
  }

  /** The view of an answer; that of a running one outlives the showing of other conversations. */
  view(node) {
    const view = this.views.get(node.id) ?? new AnswerView(node, this.alternatives, this.actions.branch);
    this.views.set(node.id, view);
    return view;
  }

  /** Show the nodes of a path. Of a comparison that nothing follows, both answers are shown. */
  show(chat, nodes) {
    for (const [id, view] of this.views) if (!view.isRunning && !nodes.some((node) => node.id === id)) this.views.delete(id);
    const items = nodes.map((node, index) => (node.role === "user" ? userTurn(chat, node, this.actions) : this.#answers(chat, node, index === nodes.length - 1)));
    this.list.replaceChildren(...items);
  }

  #answers(chat, node, isLast) {
    const pair = isLast ? pairOf(chat, node) : null;
    const shown = (pair ?? [node]).map((each) => {
      const view = this.view(each);
      view.label.hidden = !pair;
      view.label.textContent = `${each.model ?? "Model"}, temperature ${each.temperature ?? "default"}`;
      showActions(chat, view, this.actions, Boolean(pair));
      return view.element;
    });
    return make("li", { class: pair ? "pair" : "single" }, ...shown);
  }
}
