// The chat page: the conversation, its controls, and announcements for screen readers.

import { Answer } from "./answer.js";
import { get, saveKey, savedKey } from "./api.js";
import { $, make, say } from "./dom.js";
import { Tip } from "./tokens.js";

const IDEAS = ["What is 27 + 45?", "Write the times table of 12.", "Tell me a story about a lighthouse."];

const tip = new Tip($("tip"));
const turns = $("turns");
const prompt = $("prompt");
let messages = [];
let running = null;

const number = (name) => ($(name).value === "" ? undefined : Number($(name).value));

/** The controls as members of OpenAI's API. Empty ones are left out, so that the server chooses. */
const sampling = () => ({
  model: $("models").value || undefined,
  temperature: number("temperature"),
  top_p: number("top_p"),
  top_k: number("top_k"),
  max_tokens: number("max_tokens"),
  seed: number("seed"),
  repetition_penalty: number("repetition_penalty"),
  stop: $("stop_string").value || undefined,
});

function history() {
  const system = $("system").value.trim();
  return [...(system ? [{ role: "system", content: system }] : []), ...messages];
}

async function send(text) {
  $("welcome").hidden = true;
  messages.push({ role: "user", content: text });
  const said = make("div", { class: "text" });
  said.textContent = text;
  turns.append(make("li", { class: "user" }, make("span", { class: "hidden" }, "You: "), said));
  const answer = new Answer(history(), tip);
  turns.append(answer.element);
  const turn = { role: "assistant", content: "" };
  messages.push(turn);
  await work(answer, turn, (signal) => answer.begin(sampling(), signal));
}

/** Run a request for an answer or its continuation, then offer to continue. */
async function work(answer, turn, run) {
  for (const old of turns.querySelectorAll(".go-on")) old.remove();
  const controller = (running = new AbortController());
  showRunning(true);
  say($("announce"), "The model is answering.");
  const follow = new MutationObserver(stayAtEnd);
  follow.observe(answer.element, { childList: true, subtree: true });
  await run(controller.signal);
  follow.disconnect();
  if (running !== controller) return; // the conversation has been cleared meanwhile
  running = null;
  turn.content = answer.text;
  showRunning(false);
  if (answer.ending === "error" && !answer.text) takeBack();
  say($("announce"), answer.summary);
  if (answer.isOpen) offerMore(answer, turn);
  if (answer.status === 401) askForKey();
  stayAtEnd();
}

/** Remove a question that got no answer from the conversation, and put it back into the field. */
function takeBack() {
  const [question] = messages.splice(-2);
  prompt.value ||= question.content;
  grow();
}

function offerMore(answer, turn) {
  const go = () => work(answer, turn, (signal) => answer.continue(sampling(), signal));
  answer.facts.append(make("button", { class: "go-on", type: "button", onclick: go }, "Continue"));
}

function showRunning(isRunning) {
  const hadFocus = document.activeElement === (isRunning ? $("send") : $("stop"));
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
  if (hadFocus || document.activeElement === document.body) (isRunning ? $("stop") : prompt).focus();
}

function askForKey() {
  $("settings").open = true;
  $("key").focus();
}

let isAtEnd = true;
const stayAtEnd = () => isAtEnd && (turns.scrollTop = turns.scrollHeight);
turns.addEventListener("scroll", () => (isAtEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40));

const grow = () => {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
};

function submit() {
  const text = prompt.value.trim();
  if (!text || running) return;
  prompt.value = "";
  grow();
  isAtEnd = true;
  send(text);
}

function clear() {
  running?.abort();
  running = null;
  messages = [];
  turns.replaceChildren();
  $("welcome").hidden = false;
  showRunning(false);
  say($("announce"), "");
  prompt.focus();
}

async function showModel() {
  try {
    const { data } = await get("/v1/models");
    const several = data.length > 1;
    say($("model"), several ? "" : data.map(({ id }) => id).join(""));
    $("models").replaceChildren(...(several ? data.map(({ id }) => make("option", {}, id)) : []));
    $("models").hidden = !several;
  } catch (error) {
    say($("model"), error.status === 401 ? "API key needed" : "not reachable");
    if (error.status === 401) askForKey();
  }
}

function showRanges() {
  for (const output of document.querySelectorAll("#controls output")) output.value = $(output.htmlFor.value).value;
}

$("composer").addEventListener("submit", (event) => (event.preventDefault(), submit()));
$("controls").addEventListener("submit", (event) => event.preventDefault());
$("controls").addEventListener("input", showRanges);
prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", clear);
$("colours").addEventListener("change", () => turns.classList.toggle("coloured", $("colours").checked));
$("key").addEventListener("change", () => (saveKey($("key").value.trim()), showModel()));

turns.classList.add("coloured");
$("key").value = savedKey();
$("settings").open = matchMedia("(min-width: 861px)").matches;
$("ideas").append(...IDEAS.map((text) => make("button", { type: "button", onclick: () => send(text) }, text)));
showRanges();
showModel();
prompt.focus();
