// A conversation as a tree: editing a message, or answering it again, adds a branch beside what was there.

export const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

export const newChat = () => ({ id: newId(), title: "", created: Date.now(), updated: Date.now(), nodes: {}, removed: [], chosen: null });

const byAge = (one, other) => one.order - other.order;

/** The nodes below `parent` (null: the beginnings), oldest first. */
export const childrenOf = (chat, parent) => Object.values(chat.nodes).filter((node) => node.parent === parent).sort(byAge);

/** Append a node below `parent` and choose it. */
export function add(chat, parent, node) {
  const order = 1 + Math.max(0, ...Object.values(chat.nodes).map((each) => each.order));
  const added = { id: newId(), parent, order, chosen: null, changed: Date.now(), ...node };
  chat.nodes[added.id] = added;
  choose(chat, added);
  return added;
}

/** Make the branch through `node` the one that is shown. */
export function choose(chat, node) {
  if (node.parent === null) chat.chosen = node.id;
  else chat.nodes[node.parent].chosen = node.id;
}

/** The nodes that are shown, from the first message on. */
export function path(chat) {
  const nodes = [];
  for (let id = chat.chosen; id && chat.nodes[id]; id = chat.nodes[id].chosen) nodes.push(chat.nodes[id]);
  return nodes;
}

/** The nodes from the first message to `id`. */
export function pathTo(chat, id) {
  const nodes = [];
  for (let node = chat.nodes[id]; node; node = chat.nodes[node.parent]) nodes.unshift(node);
  return nodes;
}

/** Remove a node and all that follows it. Shows the nearest sibling. */
export function remove(chat, node) {
  const siblings = childrenOf(chat, node.parent);
  const at = siblings.indexOf(node);
  for (const child of childrenOf(chat, node.id)) remove(chat, child);
  delete chat.nodes[node.id];
  (chat.removed ??= []).push(node.id); // for other copies of the conversation
  const next = siblings[at - 1] ?? siblings[at + 1] ?? null;
  if (node.parent === null) chat.chosen = next?.id ?? null;
  else if (chat.nodes[node.parent]) chat.nodes[node.parent].chosen = next?.id ?? null;
}

/** Two copies of a conversation as one: with what either added, without what either removed. Of a node that both have the
 * one that changed last counts, and `ours` says which branches are shown. `theirs` may be undefined. */
export function merged(theirs, ours) {
  if (!theirs) return ours;
  const removed = [...new Set([...(theirs.removed ?? []), ...(ours.removed ?? [])])];
  const title = (theirs.renamed ?? 0) > (ours.renamed ?? 0) ? theirs.title : ours.title;
  const nodes = { ...theirs.nodes };
  for (const [id, node] of Object.entries(ours.nodes)) nodes[id] = { ...newer(nodes[id], node), chosen: node.chosen };
  for (const id of removed) delete nodes[id];
  for (const { id, parent } of Object.values(nodes).sort(byAge)) if (parent !== null && !nodes[parent]) delete nodes[id];
  const all = { ...theirs, ...ours, title, updated: Math.max(theirs.updated, ours.updated), removed, nodes };
  for (const [id, place] of [[null, all], ...Object.entries(nodes)]) {
    if (!nodes[place.chosen]) place.chosen = childrenOf(all, id).at(-1)?.id ?? null;
  }
  return all;
}

const newer = (one, other) => ((one?.changed ?? 0) > (other.changed ?? 0) ? one : other);

/** Give a conversation what a merged copy of it has more, as `opened`, or less. Returns true if there was something. */
export function adopt(chat, all, opened) {
  const added = Object.keys(all.nodes).filter((id) => !chat.nodes[id]);
  const gone = Object.keys(chat.nodes).filter((id) => !all.nodes[id]);
  for (const id of added) chat.nodes[id] = opened(all.nodes[id]);
  for (const id of gone) delete chat.nodes[id];
  for (const [id, node] of Object.entries(chat.nodes)) node.chosen = all.nodes[id].chosen;
  const { title, updated, removed, chosen } = all;
  Object.assign(chat, { title, updated, removed, chosen });
  return added.length + gone.length > 0;
}

/** How many nodes there are at and below `node`. */
export const sizeOf = (chat, node) => childrenOf(chat, node.id).reduce((sum, child) => sum + sizeOf(chat, child), 1);

/** The two answers of a comparison that `node` belongs to, or null. */
export function pairOf(chat, node) {
  if (!node.pair) return null;
  const pair = childrenOf(chat, node.parent).filter((each) => each.pair === node.pair);
  return pair.length === 2 ? pair : null;
}

/** Messages as OpenAI has them. */
export const messagesOf = (nodes, system) => [
  ...(system ? [{ role: "system", content: system }] : []),
  ...nodes.filter(({ role }) => role !== "system").map((node) =>
    node.role === "user"
      ? { role: "user", content: node.text }
      : { role: "assistant", content: node.content.text, ...(node.thoughts.text ? { reasoning_content: node.thoughts.text } : {}) }),
];

/** A title from the first message. */
export function titleOf(chat) {
  const first = path(chat)[0]?.text ?? "";
  const line = first.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 58)}…` : line || "New chat";
}

export function toMarkdown(chat, nodes) {
  const parts = nodes.map((node) => {
    if (node.role === "user") return `## You\n\n${node.text}`;
    const thoughts = node.thoughts.text ? `<details><summary>Thinking</summary>\n\n${node.thoughts.text}\n\n</details>\n\n` : "";
    return `## ${node.model || "Model"}\n\n${thoughts}${node.content.text}`;
  });
  return [`# ${chat.title || titleOf(chat)}`, ...parts].join("\n\n") + "\n";
}
