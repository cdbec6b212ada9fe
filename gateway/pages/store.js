// Conversations, kept in this browser (IndexedDB). Where that is not allowed they live as long as the page.
//
// Several tabs may have the same conversation open, so what is saved is merged with what is stored. A page that is closing
// cannot wait for what is stored: it writes its copy beside it (`leave`), and the next load or save merges both.

import { packed, unpacked, unpackedNode } from "./pack.js";
import { adopt, merged } from "./tree.js";

const [DATABASE, CHATS, INDEX] = ["tandem-chats", "chats", "index"];
const MAX_CHATS = 1000; // beyond them the oldest go
const SEARCHED = 20_000; // characters of a conversation that are searched

let opening = null;
let database = null;
let channel = null;
const memory = { [CHATS]: new Map(), [INDEX]: new Map() };

function open() {
  opening ??= new Promise((resolve) => {
    const fail = () => resolve(null);
    try {
      const request = indexedDB.open(DATABASE, 1);
      request.onupgradeneeded = () => {
        for (const name of [CHATS, INDEX]) request.result.createObjectStore(name, { keyPath: "id" });
      };
      request.onsuccess = () => resolve((database = request.result));
      request.onerror = fail;
    } catch {
      fail();
    }
  });
  return opening;
}

/** Run `work`, which waits for requests only, in one transaction. Throws DOMException, such as QuotaExceededError. */
async function transact(mode, work) {
  if (!(await open())) return work(Object.fromEntries(Object.entries(memory).map(([name, map]) => [name, inMemory(map)])));
  return new Promise((resolve, reject) => {
    const transaction = database.transaction([CHATS, INDEX], mode);
    const stores = Object.fromEntries([CHATS, INDEX].map((name) => [name, inDatabase(transaction.objectStore(name))]));
    let problem = null;
    const result = work(stores);
    result.catch((error) => {
      problem = error;
      if (transaction.error === null) transaction.abort();
    });
    transaction.oncomplete = () => resolve(result);
    transaction.onabort = () => reject(transaction.error ?? problem);
  });
}

const inMemory = (map) => ({
  get: (id) => map.get(id),
  getAll: () => [...map.values()],
  put: (value) => void map.set(value.id, structuredClone(value)),
  delete: (id) => void map.delete(id),
});

function inDatabase(store) {
  const ask = (name) => (...values) => new Promise((resolve, reject) => {
    const request = store[name](...values);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return Object.fromEntries(["get", "getAll", "put", "delete"].map((name) => [name, ask(name)]));
}

export const isLasting = async () => Boolean(await open());

/** What the list shows of each conversation: id, title, updated, and the lower-case text that is searched; newest first. */
export async function list() {
  const all = await transact("readonly", (stores) => stores[INDEX].getAll());
  return all.sort((one, other) => other.updated - one.updated);
}

const leftFor = (id) => `${id}/left`;

/** What is stored of a conversation, packed, or undefined. */
async function stored(stores, id) {
  const [chat, left] = await Promise.all([stores[CHATS].get(id), stores[CHATS].get(leftFor(id))]);
  return left ? merged(chat, { ...left, id }) : chat;
}

/** A conversation, or undefined. */
export async function load(id) {
  const chat = await transact("readonly", (stores) => stored(stores, id));
  return chat && unpacked(chat);
}

function textOf(chat) {
  const texts = Object.values(chat.nodes).map((node) => (node.role === "user" ? node.text : node.content.text));
  return [chat.title, ...texts].join("\n").slice(0, SEARCHED).toLowerCase();
}

const entryOf = (chat) => ({ id: chat.id, title: chat.title, updated: chat.updated, text: textOf(chat) });

/** Save a conversation, which gets what other tabs have made of it. Returns true if there was something. */
export const save = (chat) =>
  transact("readwrite", async (stores) => {
    const before = await stored(stores, chat.id);
    const all = merged(before, packed(chat));
    const isChanged = adopt(chat, all, unpackedNode);
    await Promise.all([stores[INDEX].put(entryOf(chat)), stores[CHATS].put(all), stores[CHATS].delete(leftFor(chat.id))]);
    return isChanged;
  });

/** Write a conversation down at once, for a page that is closing. */
export function leave(chat) {
  if (!database) return;
  const transaction = database.transaction([CHATS, INDEX], "readwrite");
  transaction.objectStore(INDEX).put(entryOf(chat));
  transaction.objectStore(CHATS).put({ ...packed(chat), id: leftFor(chat.id) });
  transaction.commit();
}

export const remove = (id) =>
  transact("readwrite", (stores) => Promise.all([stores[INDEX].delete(id), stores[CHATS].delete(id), stores[CHATS].delete(leftFor(id))]));

/** Remove the oldest conversations beyond the limit. */
export async function trim() {
  for (const { id } of (await list()).slice(MAX_CHATS)) await remove(id);
}

/** Tell other tabs that a conversation has changed, or is gone. */
export const tell = (id) => channel?.postMessage(id);

/** `onChange(id)` is called when another tab has changed a conversation. */
export async function listen(onChange) {
  if (!(await open())) return;
  channel = new BroadcastChannel(DATABASE);
  channel.onmessage = ({ data }) => onChange(data);
}
