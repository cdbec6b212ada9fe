// Tokens packed for the store: a long answer's hundred thousand alternatives as a few arrays, which are copied in a moment.

const SEPARATOR = "\u0000";

/** Each token is followed by its alternatives; `counts` has how many. */
export function pack(tokens) {
  const size = tokens.reduce((sum, { top }) => sum + 1 + top.length, 0);
  const packed = { ids: new Int32Array(size), logprobs: new Float32Array(size), counts: new Uint8Array(tokens.length), texts: "" };
  const texts = [];
  const put = ({ id = -1, logprob, text }) => {
    packed.ids[texts.length] = id;
    packed.logprobs[texts.length] = logprob;
    texts.push(text.replaceAll(SEPARATOR, " "));
  };
  tokens.forEach((token, index) => {
    packed.counts[index] = token.top.length;
    put(token);
    token.top.forEach(put);
  });
  packed.texts = texts.join(SEPARATOR);
  return packed;
}

export function unpack({ ids, logprobs, counts, texts }) {
  const all = texts.split(SEPARATOR);
  let at = 0;
  const take = () => ({ id: ids[at] < 0 ? undefined : ids[at], logprob: logprobs[at], text: all[at++] });
  return Array.from(counts, (count) => ({ ...take(), top: Array.from({ length: count }, take) }));
}

const withNodes = (chat, change) => ({ ...chat, nodes: Object.fromEntries(Object.entries(chat.nodes).map(([id, node]) => [id, change(node)])) });
const packedNode = (node) => (node.tokens ? { ...node, tokens: pack(node.tokens) } : node);

export const unpackedNode = (node) => (node.tokens ? { ...node, tokens: unpack(node.tokens) } : node);

/** A conversation with the tokens of its answers packed, or unpacked again. */
export const packed = (chat) => withNodes(chat, packedNode);
export const unpacked = (chat) => withNodes(chat, unpackedNode);
