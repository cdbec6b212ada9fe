// Conversations, kept in this browser (IndexedDB). Where that is not allowed they live as long as the page.

import { packed, unpacked } from "./pack.js";

const [DATABASE, CHATS, INDEX] = ["tandem-chats", "chats", "index"];
const MAX_CHATS = 1000; // beyond them the oldest go
const SEARCHED = 20_000; // characters of a conversation that are searched

let opening = null;
const memory = { [CHATS]: new Map(), [INDEX]: new Map() };

function open() {
  opening ??= new Promise((resolve) => {
    const fail = () => resolve(null);
    try {
      const request = indexedDB.open(DATABASE, 1);
      request.onupgradeneeded = () => {
        for (const name of [CHATS, INDEX]) request.result.createObjectStore(name, { keyPath: "id" });
      };
      request.onsuccess = () => resolve(request.result);
      request.onerror = fail;
    } catch {
      fail();
    }
  });
  return opening;
}

/** Run requests in one transaction. Throws DOMException, such as QuotaExceededError. */
async function transact(mode, work) {
  const database = await open();
  if (!database) return work(Object.fromEntries(Object.entries(memory).map(([name, map]) => [name, inMemory(map)])));
  return new Promise((resolve, reject) => {
    const transaction = database.transaction([CHATS, INDEX], mode);
    const stores = Object.fromEntries([CHATS, INDEX].map((name) => [name, transaction.objectStore(name)]));
    const request = work(stores);
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}

const inMemory = (map) => ({
  get: (id) => map.get(id),
  getAll: () => [...map.values()],
  put: (value) => void map.set(value.id, structuredClone(value)),
  delete: (id) => void map.delete(id),
});

export const isLasting = async () => Boolean(await open());

/** What the list shows of each conversation: id, title, updated, and the lower-case text that is searched; newest first. */
export async function list() {
  const all = await transact("readonly", (stores) => stores[INDEX].getAll());
  return all.sort((one, other) => other.updated - one.updated);
}

/** A conversation, or undefined. */
export async function load(id) {
  const chat = await transact("readonly", (stores) => stores[CHATS].get(id));
  return chat && unpacked(chat);
}

function textOf(chat) {
  const texts = Object.values(chat.nodes).map((node) => (node.role === "user" ? node.text : node.content.text));
  return [chat.title, ...texts].join("\n").slice(0, SEARCHED).toLowerCase();
}

export async function save(chat) {
  const entry = { id: chat.id, title: chat.title, updated: chat.updated, text: textOf(chat) };
  await transact("readwrite", (stores) => {
    stores[INDEX].put(entry);
    return stores[CHATS].put(packed(chat));
  });
}

export const remove = (id) =>
  transact("readwrite", (stores) => {
    stores[INDEX].delete(id);
    return stores[CHATS].delete(id);
  });

/** Remove the oldest conversations beyond the limit. */
export async function trim() {
  for (const { id } of (await list()).slice(MAX_CHATS)) await remove(id);
}
