// One answer of the model: reads its stream, and shows it as it grows.

import { post, stream } from "./api.js";
import { make, say } from "./dom.js";
import { Draft } from "./draft.js";
import { HeatStrip } from "./heat.js";
import { packAhead } from "./pack.js";
import { explain } from "./problems.js";
import { Prose } from "./prose.js";
import { plain } from "./region.js";
import { TokenKeys, confidence, percent } from "./tokens.js";
import { messagesOf } from "./tree.js";
import { count } from "./units.js";

const NUM_ALTERNATIVES = 5;
const REST = 4; // after a drawing that took t ms, the next one is at least REST times t away
const BUDGET_MS = 8; // for building elements, within a frame
const ENDINGS = { stop: "complete", length: "length limit", stopped: "stopped by you", error: "failed", running: "left while it ran" };
const rounded = (rate) => (rate < 10 ? rate.toFixed(1) : count(rate));
const seconds = (ms) => (ms < 950 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

/** Let the browser draw between the chunks of a burst. Hidden pages, whose timers are slow, go on. */
const nextTask = () => new Promise((resolve) => (document.hidden ? resolve() : setTimeout(resolve))).then(() => performance.now());

/** True if the answer can be continued. */
export const isOpen = (node) => node.ids.length > 0 && node.ending !== "stop" && node.ending !== null;

export class AnswerView {
  /** `node` is the answer's node of the conversation; `choose(number, other)` goes on from an alternative. */
  constructor(node, alternatives, choose) {
    this.node = node;
    this.draft = new Draft(node);
    this.isRunning = false;
    this.isPlain = false;
    this.pending = null;
    this.lastCost = 0;
    this.body = make("div", { class: "text", role: "group", "aria-label": "Answer" });
    this.thoughts = make("div", { class: "thoughts", role: "group", "aria-label": "Thinking" });
    this.thinking = make("details", { class: "thinking", hidden: true }, make("summary", {}, "Thinking"), this.thoughts);
    this.prose = [new Prose(this.thoughts, this.draft.thoughts), new Prose(this.body, this.draft.content)];
    const tokenOf = (number) => this.draft.tokens[number];
    const pick = (number) => (this.isRunning || this.draft.ids.length <= number ? null : (other) => choose(this, number, other));
    this.keys = [this.thoughts, this.body].map((element) => new TokenKeys(element, alternatives, tokenOf, pick));
    this.heat = new HeatStrip((number) => this.reveal(number));
    this.problem = make("div", { class: "problem", role: "alert", hidden: true });
    this.label = make("p", { class: "label", hidden: true });
    this.facts = make("details", { class: "facts" });
    this.actions = make("div", { class: "actions" });
    const foot = make("div", { class: "foot" }, this.actions, this.facts);
    this.element = make("article", { class: "answer", "aria-label": "Answer of the model" }, this.label, this.thinking, this.heat.element, this.body, this.problem, foot);
    this.#show(true);
    if (node.error) this.#explain(node.error);
  }

  /** Ask for an answer to `nodes`, until its end or until `signal` aborts it. */
  begin(nodes, request, signal) {
    const body = { ...request.sampling, messages: messagesOf(nodes, request.system), logprobs: true, top_logprobs: NUM_ALTERNATIVES };
    return this.#run("/v1/chat/completions", async () => body, (choice) => this.draft.takeChat(choice), signal);
  }

  /** Go on exactly behind the last token: the prompt is the token ids of the conversation and of the answer. */
  continue(nodes, request, signal) {
    this.draft.goOn();
    for (const prose of this.prose) (prose.clear(), prose.render()); // the last block is open again
    const body = async () => {
      const { model } = request.sampling;
      const { tokenize_response: tokens } = await post("/chat_tokenize", { model, messages: messagesOf(nodes, request.system) }, signal);
      const prompt = [...tokens.map(({ id }) => id), ...this.draft.ids];
      const max_tokens = request.sampling.max_tokens ?? Math.max(1, request.maxTotal - prompt.length);
      this.node.figures.prompt ??= tokens.length;
      return { ...request.sampling, max_tokens, prompt, logprobs: NUM_ALTERNATIVES };
    };
    return this.#run("/v1/completions", body, (choice) => this.draft.takeCompletion(choice), signal);
  }

  async #run(path, makeBody, take, signal) {
    const begun = performance.now();
    Object.assign(this.node, { ending: "running", error: null, changed: Date.now() });
    this.node.figures = { prompt: this.node.figures?.prompt ?? null };
    [this.isRunning, this.problem.hidden] = [true, true];
    this.element.classList.add("running");
    try {
      const options = { stream_options: { include_usage: true }, return_token_ids: true };
      let reason = null;
      let breath = performance.now();
      for await (const chunk of stream(path, { ...(await makeBody()), ...options }, signal)) {
        signal.throwIfAborted();
        if (chunk.usage) this.node.figures.prompt ??= chunk.usage.prompt_tokens;
        const choice = chunk.choices[0];
        reason = choice?.finish_reason ?? reason;
        if (choice && take(choice)) this.#count(begun, choice);
        if (performance.now() - breath > BUDGET_MS) breath = await nextTask();
      }
      this.node.ending = reason ?? "stop";
    } catch (error) {
      this.node.ending = signal.aborted ? "stopped" : "error";
      if (!signal.aborted) this.node.error = { status: error.status ?? 500, message: error.message, retryAfter: error.retryAfter, requestId: error.requestId };
    } finally {
      await nextTask(); // the last burst has had its share of this one
      this.draft.finish();
      Object.assign(this.node, this.draft.stored);
      this.isRunning = false;
      this.element.classList.remove("running");
      this.#show(true);
      if (this.node.error) this.#explain(this.node.error);
    }
  }

  #count(begun, { token_ids: ids = [] }) {
    const now = performance.now();
    const figures = this.node.figures;
    figures.first ??= now - begun;
    figures.total = now - begun;
    figures.fresh = (figures.fresh ?? 0) + ids.length;
    packAhead(this.draft.tokens);
    this.#schedule();
  }

  #schedule() {
    if (this.pending !== null) return;
    const draw = () => requestAnimationFrame(() => {
      this.pending = null;
      this.#show(!this.isRunning);
    });
    this.pending = setTimeout(draw, REST * this.lastCost);
  }

  #show(isFinal) {
    const begun = performance.now();
    const { thoughts, content } = this.draft;
    this.thinking.hidden = !thoughts.text;
    if (thoughts.text) this.#showThinking(content.text || isFinal);
    if (this.isPlain) this.#showPlain();
    else if (!this.prose.map((prose) => prose.render(isFinal, BUDGET_MS)).every(Boolean)) this.#schedule();
    for (const keys of this.keys) keys.ready();
    this.#showFacts();
    if (isFinal) nextTask().then(() => this.heat.draw(this.draft.tokens));
    this.lastCost = performance.now() - begun;
    this.onShow?.();
  }

  #showThinking(isDone) {
    const words = this.draft.thoughts.text.split(/\s+/).length;
    say(this.thinking.firstChild, isDone ? `Thought in ${words.toLocaleString("en")} words` : "Thinking …");
  }

  #showPlain() {
    this.thoughts.replaceChildren(plain(this.draft.thoughts));
    this.body.replaceChildren(plain(this.draft.content));
  }

  /** Show the text as the model wrote it, or as it is meant. */
  setPlain(isPlain) {
    this.isPlain = isPlain;
    this.redraw();
  }

  redraw() {
    for (const prose of this.prose) prose.clear();
    this.#show(!this.isRunning);
  }

  /** Scroll to a token, or to the nearest one before it that is shown, and focus it. */
  reveal(number) {
    const [element, region] = this.draft.content.numbers[0] <= number ? [this.body, this.draft.content] : [this.thoughts, this.draft.thoughts];
    if (element === this.thoughts) this.thinking.open = true;
    let span = null;
    for (let at = region.numbers.findLastIndex((each) => each <= number); at >= 0 && !span; at--) {
      span = element.querySelector(`[data-t="${region.numbers[at]}"]`);
    }
    span?.scrollIntoView({ block: "center", behavior: "instant" });
    span?.focus({ preventScroll: true });
  }

  #explain(error) {
    const [title, advice] = explain(error);
    const details = make("details", {}, make("summary", {}, "Details"), make("p", {}, error.message, error.requestId ? ` (request ${error.requestId})` : ""));
    this.problem.replaceChildren(make("p", {}, make("strong", {}, title), " ", advice), details);
    this.problem.hidden = false;
  }

  get rate() {
    const { first, total, fresh } = this.node.figures ?? {};
    return fresh > 1 && total > first ? ((fresh - 1) * 1000) / (total - first) : null;
  }

  /** One quiet line; it opens to all figures. */
  #showFacts() {
    const { figures, ending, model, temperature } = this.node;
    const sure = confidence(this.draft.tokens);
    const short = [sure === null ? null : `${percent(sure)} sure`, this.rate && `${rounded(this.rate)} tokens/s`];
    const isUnusual = Boolean(ending) && ending !== "stop" && !this.isRunning;
    if (isUnusual) short.push(ENDINGS[ending] ?? ending);
    this.facts.hidden = sure === null && !figures?.first && !isUnusual;
    const summary = this.facts.querySelector("summary") ?? this.facts.appendChild(make("summary"));
    say(summary, short.filter(Boolean).join(" · "));
    if (this.isRunning) return;
    const rows = [
      ["Confidence", sure === null ? null : percent(sure)], ["Ended", ENDINGS[ending] ?? ending], ["First token after", figures?.first && seconds(figures.first)],
      ["Speed", this.rate && `${rounded(this.rate)} tokens/s`], ["Prompt", figures?.prompt && `${figures.prompt.toLocaleString("en")} tokens`],
      ["Answer", this.draft.ids.length && `${this.draft.ids.length.toLocaleString("en")} tokens`], ["Model", model], ["Temperature", temperature],
    ];
    const shown = rows.filter(([, value]) => value !== null && value !== undefined && value !== 0 && value !== "");
    this.facts.querySelector("dl")?.remove();
    this.facts.append(make("dl", {}, ...shown.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value))))));
  }

  /** The answer in one sentence, for screen readers. */
  get summary() {
    const sure = confidence(this.draft.tokens);
    return `${this.draft.content.text || "No text."} (${ENDINGS[this.node.ending] ?? this.node.ending}${sure === null ? "" : `, confidence ${percent(sure)}`})`;
  }
}
