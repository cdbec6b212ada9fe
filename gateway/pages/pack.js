// Tokens packed for the store: a long answer's hundred thousand alternatives as a few arrays, which are copied in a moment.

const SEPARATOR = "\u0000";

const PART = 500; // tokens that are worth packing while an answer grows
const EMPTY = { ids: new Int32Array(0), logprobs: new Float32Array(0), counts: new Uint8Array(0), texts: "" };
const known = new WeakMap(); // what is packed of a list of tokens, which only grows

const longer = (array, size) => {
  const copy = new array.constructor(array.length + size);
  copy.set(array);
  return copy;
};

/** Each token is followed by its alternatives; `counts` has how many. What is packed of the list already is copied. */
export function pack(tokens) {
  const before = known.get(tokens) ?? EMPTY;
  const fresh = tokens.slice(before.counts.length);
  if (!fresh.length) return before;
  const size = fresh.reduce((sum, { top }) => sum + 1 + top.length, 0);
  const packed = { ids: longer(before.ids, size), logprobs: longer(before.logprobs, size), counts: longer(before.counts, fresh.length), texts: "" };
  const texts = before.counts.length ? [before.texts] : [];
  let at = before.ids.length;
  const put = ({ id = -1, logprob, text }) => {
    packed.ids[at] = id;
    packed.logprobs[at++] = logprob;
    texts.push(text.replaceAll(SEPARATOR, " "));
  };
  fresh.forEach((token, index) => {
    packed.counts[before.counts.length + index] = token.top.length;
    put(token);
    token.top.forEach(put);
  });
  packed.texts = texts.join(SEPARATOR);
  known.set(tokens, packed);
  return packed;
}

/** Pack what a growing answer has by now, so that little is left to do at once when it is saved. */
export function packAhead(tokens) {
  if (tokens.length - (known.get(tokens) ?? EMPTY).counts.length >= PART) pack(tokens);
}

export function unpack(packed) {
  const { ids, logprobs, counts, texts } = packed;
  const all = texts.split(SEPARATOR);
  let at = 0;
  const take = () => ({ id: ids[at] < 0 ? undefined : ids[at], logprob: logprobs[at], text: all[at++] });
  const tokens = Array.from(counts, (count) => ({ ...take(), top: Array.from({ length: count }, take) }));
  known.set(tokens, packed);
  return tokens;
}

const withNodes = (chat, change) => ({ ...chat, nodes: Object.fromEntries(Object.entries(chat.nodes).map(([id, node]) => [id, change(node)])) });
const packedNode = (node) => (node.tokens ? { ...node, tokens: pack(node.tokens) } : node);

export const unpackedNode = (node) => (node.tokens ? { ...node, tokens: unpack(node.tokens) } : node);

/** A conversation with the tokens of its answers packed, or unpacked again. */
export const packed = (chat) => withNodes(chat, packedNode);
export const unpacked = (chat) => withNodes(chat, unpackedNode);
