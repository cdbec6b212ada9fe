// The chat page: the open conversation, what is done with it, and announcements for screen readers.

import { get } from "./api.js";
import { $, isSending, make, say } from "./dom.js";
import { browser } from "./remembered.js";
import { Sidebar, exportJson, exportMarkdown } from "./sidebar.js";
import { askForKey, keyAccepted, openSettings, otherTemperature, sampling, startSettings, system } from "./settings.js";
import * as store from "./store.js";
import { Alternatives } from "./tokens.js";
import { add, choose, newChat, newId, path, pathTo, remove, titleOf } from "./tree.js";
import { Turns, edit, showActions } from "./turns.js";

const IDEAS = ["What is 27 + 45?", "Write the times table of 12.", "Tell me a story about a dragon."];
const [FIRST_SAVE_MS, SAVE_EVERY_MS] = [500, 5000];
const NOT_KEPT = "This browser keeps no conversations: they are lost when the page is closed.";
const ASK_AGAIN_MS = 3000;
const prompt = $("prompt");
const [FEW, ALL] = [40, 1e9];

let chat = newChat();
let models = [];
const runs = new Set(); // {chat, controller, views}
const behind = new WeakSet(); // conversations that have got something of another tab, which is not shown yet

const runsHere = () => [...runs].filter((run) => run.chat === chat);

const actions = {
  render: () => render(),
  edit: (node, text) => answer(add(chat, node.parent, { role: "user", text })),
  regenerate: (node) => answer(chat.nodes[node.parent], { isSingle: true }),
  proceed: (view) => proceed(view),
  retry: (view) => (view.draft.ids.length ? proceed(view) : work([view], begin)),
  show: (node) => (choose(chat, node), render(), keep(chat)),
  keep: (node) => (choose(chat, node), delete node.pair, (node.changed = Date.now()), render(), keep(chat), prompt.focus()),
  remove: (node) => removeTurn(node),
  branch: (view, number, other) => branch(view, number, other),
};
const turns = new Turns($("turns"), new Alternatives($("tip"), $("panel")), actions);

function render(limit = FEW) {
  const nodes = path(chat);
  const hidden = Math.max(0, nodes.length - limit);
  turns.show(chat, nodes.slice(hidden));
  if (hidden) $("turns").prepend(make("li", { class: "earlier" }, make("button", { type: "button", onclick: () => render(ALL) }, `Show ${hidden} earlier messages`)));
  $("welcome").hidden = nodes.length > 0;
  document.title = chat.title ? `${chat.title} – Tandem` : "Tandem: chat";
  showRunning();
}

const save = async (saved) => void ((await store.save(saved)) && behind.add(saved));

const showNotice = async () => say($("notice"), (await store.isLasting()) ? "" : NOT_KEPT);

/** Save, and show the list anew. */
async function keep(saved) {
  if (saved.isRemoved) return;
  saved.title ||= titleOf(saved);
  try {
    await save(saved);
    store.tell(saved.id);
    await showNotice();
    if (saved === chat && behind.has(chat) && isIdle()) (behind.delete(chat), render());
  } catch (error) {
    say($("notice"), error.name === "QuotaExceededError" ? "This browser has no room left: delete conversations to keep new ones." : "This conversation could not be kept.");
  }
  await sidebar.refresh();
}

/** What is asked of the gateway. `node` has the model and the temperature. */
function request(node) {
  const model = models.find(({ id }) => id === node.model) ?? models[0];
  return {
    sampling: { ...sampling(), model: node.model ?? undefined, temperature: node.temperature ?? undefined },
    system: system(),
    maxTotal: model?.max_model_len ?? 4096,
  };
}

const newAnswer = (changes) => ({
  role: "assistant", model: $("models").value || models[0]?.id || null, temperature: sampling().temperature ?? null, figures: {}, ending: null,
  error: null, tokens: [], ids: [], thoughts: { text: "", numbers: [], ends: [] }, content: { text: "", numbers: [], ends: [] }, ...changes,
});

/** Answer a message: once, or twice side by side. */
function answer(question, { isSingle = false } = {}) {
  const isCompared = !isSingle && !$("compare-bar").hidden;
  const pair = isCompared ? newId() : null;
  const nodes = [add(chat, question.id, newAnswer({ pair }))];
  if (isCompared) nodes.push(add(chat, question.id, newAnswer({ pair, model: $("other-model").value || nodes[0].model, temperature: otherTemperature() })));
  isAtEnd = true;
  return work(nodes.map((node) => turns.view(node)), begin);
}

const begin = (view, here, signal) => view.begin(pathTo(here, view.node.parent), request(view.node), signal);
const resume = (view, here, signal) => view.continue(pathTo(here, view.node.parent), request(view.node), signal);
const proceed = (view) => work([view], resume);

/** Go on from another token than the model chose: a new version of the answer, up to there the same. */
function branch(view, number, other) {
  const draft = view.draft.branch(number, other);
  const { parent, model, temperature } = view.node;
  return work([turns.view(add(chat, parent, newAnswer({ model, temperature, ...draft.stored })))], resume);
}

/** Run requests side by side, each for one answer, in the open conversation. */
async function work(views, run) {
  const here = chat;
  const current = { chat: here, controller: new AbortController(), views };
  runs.add(current);
  isAtEnd = true;
  here.updated = Date.now();
  location.hash = here.id;
  say($("announce"), "The model is answering.");
  const ended = views.map((view) => {
    view.onShow = stayAtEnd;
    return run(view, here, current.controller.signal).then(() => turns.list.contains(view.element) && showActions(here, view, actions));
  });
  render();
  stayAtEnd();
  keep(here);
  const saving = [setTimeout(saveSoFar, FIRST_SAVE_MS, current), setInterval(saveSoFar, SAVE_EVERY_MS, current)];
  await Promise.all(ended);
  saving.forEach(clearTimeout);
  runs.delete(current);
  await keep(here);
  if (here !== chat) return;
  showRunning();
  say($("announce"), views.map((view) => view.summary).join(" "));
  const statuses = views.map(({ node }) => node.error?.status);
  if (statuses.includes(401)) askForKey();
  if (statuses.includes(0)) showModels();
  stayAtEnd();
}

/** Save what there is of answers that run. */
function saveSoFar({ chat: here, views }, write = save) {
  for (const { node, draft } of views) Object.assign(node, draft.stored);
  if (!here.isRemoved) write(here)?.catch(() => {});
}

/** Nothing runs in the open conversation, and no message is being edited. */
const isIdle = () => !runsHere().length && !turns.list.querySelector(".editor");

/** Another tab has changed a conversation: show it as it is now, or end what runs for it if it is gone. */
async function changedElsewhere(id) {
  await sidebar.refresh();
  if (id !== chat.id && ![...runs].some((run) => run.chat.id === id)) return;
  const found = await store.load(id);
  if (!found) return removed(id);
  if (id !== chat.id || !isIdle()) return; // what is saved here is merged
  chat = found;
  turns.views.clear();
  render();
}

function removeTurn(node) {
  stop();
  remove(chat, node);
  render();
  if (Object.keys(chat.nodes).length) keep(chat);
  else store.remove(chat.id).then(() => (store.tell(chat.id), sidebar.refresh(), startNew("replaceState")));
}

function showRunning() {
  const isRunning = runsHere().length > 0;
  const hadFocus = document.activeElement === (isRunning ? $("send") : $("stop"));
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
  if (hadFocus || document.activeElement === document.body) (isRunning ? $("stop") : prompt).focus();
}

const stop = () => runsHere().forEach(({ controller }) => controller.abort());

/** `change`: "replaceState" where nothing is left to come back to. */
function startNew(change = "pushState") {
  chat = newChat();
  if (location.hash) history[change](null, "", location.pathname);
  say($("announce"), "");
  render();
  sidebar.show();
  if (sidebar.isOverlay) sidebar.toggle(false);
  prompt.focus();
}

async function openChat(id) {
  if (id === chat.id) return;
  const running = [...runs].find((run) => run.chat.id === id);
  const found = running?.chat ?? (await store.load(id));
  if (!found) return startNew("replaceState"), say($("notice"), "This conversation is not in this browser.");
  chat = found;
  location.hash = id;
  isAtEnd = true;
  showNotice();
  render();
  sidebar.show();
  stayAtEnd();
}

async function rename(id, title) {
  const renamed = id === chat.id ? chat : ([...runs].find((run) => run.chat.id === id)?.chat ?? (await store.load(id)));
  Object.assign(renamed, { title, renamed: Date.now() });
  await keep(renamed);
  if (renamed === chat) document.title = `${title} – Tandem`;
}

/** A conversation has been deleted: end what runs for it. */
function removed(id) {
  for (const run of runs) {
    if (run.chat.id !== id) continue;
    run.chat.isRemoved = true;
    run.controller.abort();
  }
  if (id === chat.id) startNew("replaceState");
}

const sidebar = new Sidebar({ current: () => chat, open: openChat, renamed: rename, removed });

let isAtEnd = true;
let lastHeight = 0;
const page = $("scroller");
const stayAtEnd = () => isAtEnd && (page.scrollTop = page.scrollHeight);
const leaveEnd = () => (isAtEnd = false);

/** The page stays at its end until the reader goes elsewhere. Blocks get their real height when they come into view. */
function followEnd() {
  page.addEventListener("scroll", () => {
    const isNear = page.scrollHeight - page.scrollTop - page.clientHeight < 60;
    if (isNear || page.scrollHeight === lastHeight) isAtEnd = isNear;
    lastHeight = page.scrollHeight;
    $("to-end").hidden = isNear;
  }, { passive: true });
  page.addEventListener("wheel", ({ deltaY }) => deltaY < 0 && leaveEnd(), { passive: true });
  page.addEventListener("touchmove", leaveEnd, { passive: true });
  for (const kind of ["pointerdown", "keydown"]) turns.list.addEventListener(kind, leaveEnd);
  new ResizeObserver(stayAtEnd).observe(turns.list);
}

const toEnd = () => ((isAtEnd = true), stayAtEnd());

const grow = () => {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
};

function submit(text = prompt.value.trim()) {
  if (!text || runsHere().length) return;
  prompt.value = "";
  grow();
  answer(add(chat, path(chat).at(-1)?.id ?? null, { role: "user", text }));
}

let asking = null;

/** Show the served models; while the gateway cannot be reached, ask again. */
async function showModels() {
  clearTimeout(asking);
  try {
    models = (await get("/v1/models")).data;
    const several = models.length > 1;
    const options = () => models.map(({ id }) => make("option", {}, id));
    const chosen = browser.get("tandem-model");
    say($("model"), several ? "" : models.map(({ id }) => id).join(""));
    for (const id of ["models", "other-model"]) $(id).replaceChildren(...options());
    if (models.some(({ id }) => id === chosen)) $("models").value = chosen;
    if (several) $("other-model").value = models.find(({ id }) => id !== $("models").value).id;
    $("models").hidden = !several;
    $("other-model").hidden = $("other-model-label").hidden = !several;
    keyAccepted();
  } catch (error) {
    say($("model"), error.status === 401 ? "API key needed" : "not reachable");
    if (error.status === 401) askForKey();
    else asking = setTimeout(showModels, ASK_AGAIN_MS);
  }
}

const SHORTCUTS = {
  "Ctrl+k": () => (sidebar.toggle(true), $("search").focus()),
  "Ctrl+Shift+O": () => startNew(),
  "Ctrl+ArrowDown": toEnd,
  "Ctrl+,": () => openSettings(),
};

function shortcut(event) {
  if (event.key === "Escape" && !$("settings").open) return sidebar.isInTheWay ? (sidebar.toggle(false), $("menu").focus()) : stop();
  const name = `${event.ctrlKey || event.metaKey ? "Ctrl+" : ""}${event.shiftKey ? "Shift+" : ""}${event.key}`;
  const isTyping = event.target.closest("input, textarea, select, dialog");
  if (name === "/" && !isTyping) (event.preventDefault(), prompt.focus());
  if (!SHORTCUTS[name]) return undefined;
  event.preventDefault();
  return SHORTCUTS[name]();
}

function press(event) {
  if (event.key === "ArrowUp" && !prompt.value && !runsHere().length) {
    const last = path(chat).findLast(({ role }) => role === "user");
    const item = last && $("turns").querySelector(`[data-node="${last.id}"]`);
    if (item) (event.preventDefault(), edit(item, last, actions));
  }
  if (!isSending(event)) return;
  event.preventDefault();
  submit();
}

function toggleCompare() {
  $("compare-bar").hidden = !$("compare-bar").hidden;
  $("compare").setAttribute("aria-pressed", !$("compare-bar").hidden);
}

async function start() {
  followEnd();
  $("composer").addEventListener("submit", (event) => (event.preventDefault(), submit()));
  prompt.addEventListener("input", grow);
  prompt.addEventListener("keydown", press);
  document.addEventListener("keydown", shortcut);
  $("stop").addEventListener("click", stop);
  $("new-chat").addEventListener("click", () => startNew());
  $("to-end").addEventListener("click", toEnd);
  $("compare").addEventListener("click", toggleCompare);
  $("models").addEventListener("change", () => browser.set("tandem-model", $("models").value));
  $("export-markdown").addEventListener("click", () => exportMarkdown(chat));
  $("export-json").addEventListener("click", () => exportJson(chat));
  addEventListener("hashchange", () => (location.hash.length > 1 ? openChat(location.hash.slice(1)) : startNew()));
  addEventListener("pagehide", () => runs.forEach((run) => saveSoFar(run, store.leave)));
  document.addEventListener("visibilitychange", () => document.hidden && runs.forEach((run) => saveSoFar(run)));
  addEventListener("online", showModels);
  addEventListener("highlighter", () => turns.views.forEach((view) => view.redraw()));
  $("ideas").append(...IDEAS.map((text) => make("button", { type: "button", onclick: () => submit(text) }, text)));
  startSettings(showModels);
  showModels();
  render();
  $("incomplete").remove();
  await sidebar.refresh();
  if (location.hash.length > 1) await openChat(location.hash.slice(1));
  await store.listen(changedElsewhere);
  if (!(await store.isLasting())) showNotice();
  store.trim().catch(() => {});
  prompt.focus();
}

start();
