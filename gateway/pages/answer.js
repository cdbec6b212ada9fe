// One answer of the model: reads its stream, shows its figures, and continues it.

import { post, stream } from "./api.js";
import { make, say } from "./dom.js";
import { TokenText, confidence, percent } from "./tokens.js";

const NUM_ALTERNATIVES = 5;
const ENDINGS = { stop: "complete", length: "length limit", stopped: "stopped by you", error: "failed" };

const fromChat = (choice) => ({
  text: choice.delta.content ?? "",
  ids: choice.token_ids ?? [],
  tokens: (choice.logprobs?.content ?? []).map(({ token, logprob, top_logprobs }) => ({
    text: token,
    logprob,
    top: top_logprobs.map((each) => ({ text: each.token, logprob: each.logprob })),
  })),
});

const fromCompletion = ({ text, token_ids, logprobs }) => ({
  text,
  ids: token_ids ?? [],
  tokens: (logprobs?.tokens ?? []).map((token, index) => ({
    text: token,
    logprob: logprobs.token_logprobs[index],
    top: Object.entries(logprobs.top_logprobs?.[index] ?? {})
      .map(([other, logprob]) => ({ text: other, logprob }))
      .sort((one, other) => other.logprob - one.logprob),
  })),
});

export class Answer {
  constructor(messages, tip) {
    this.messages = messages;
    this.ids = [];
    this.numPrompt = null;
    this.ending = null;
    const body = make("div", { class: "text", role: "group", "aria-label": "Answer" });
    this.body = new TokenText(body, tip);
    this.facts = make("p", { class: "facts" });
    this.error = make("p", { class: "error", role: "alert", hidden: true });
    this.element = make("li", { class: "answer" }, body, this.error, this.facts);
  }

  get text() {
    return this.body.text;
  }

  /** True if the answer can be continued. */
  get isOpen() {
    return this.ids.length > 0 && (this.ending === "length" || this.ending === "stopped");
  }

  /** Request an answer, until its end or until `signal` aborts it. */
  begin(sampling, signal) {
    const body = { ...sampling, messages: this.messages, logprobs: true, top_logprobs: NUM_ALTERNATIVES };
    return this.#run("/v1/chat/completions", body, fromChat, signal);
  }

  /** Continue exactly after the last token: the new prompt is the token ids of the prompt and the answer. */
  async continue(sampling, signal) {
    const prompt = async () => {
      const { tokenize_response: tokens } = await post("/chat_tokenize", { model: sampling.model, messages: this.messages }, signal);
      return [...tokens.map(({ id }) => id), ...this.ids];
    };
    await this.#run("/v1/completions", { ...sampling, logprobs: NUM_ALTERNATIVES }, fromCompletion, signal, prompt);
  }

  async #run(path, body, read, signal, prompt = null) {
    this.begun = performance.now();
    this.first = this.last = null;
    this.numNew = 0;
    this.ending = null;
    this.error.hidden = true;
    this.#showFacts();
    this.element.classList.add("running");
    try {
      const rest = prompt ? { ...body, prompt: await prompt() } : body;
      const options = { stream_options: { include_usage: true }, return_token_ids: true, separate_reasoning: false };
      for await (const chunk of stream(path, { ...rest, ...options }, signal)) {
        signal.throwIfAborted();
        this.#take(chunk, read);
      }
    } catch (error) {
      this.ending = signal.aborted ? "stopped" : "error";
      if (!signal.aborted) this.#fail(error);
    } finally {
      this.element.classList.remove("running");
      this.#showFacts();
    }
  }

  #take(chunk, read) {
    if (chunk.usage) this.numPrompt ??= chunk.usage.prompt_tokens; // the prompt of a continuation includes the answer so far
    const choice = chunk.choices[0];
    if (!choice) return;
    this.ending = choice.finish_reason ?? this.ending;
    if (choice.delta && choice.delta.content === undefined) return;
    const { text, ids, tokens } = read(choice);
    if (!text && !ids.length && !tokens.length) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.numNew += ids.length;
    this.ids.push(...ids);
    this.body.add(text, tokens[0]);
    this.#showFacts();
  }

  #fail(error) {
    say(this.error, error.message);
    this.error.hidden = false;
    this.status = error.status;
  }

  #showFacts() {
    const facts = [];
    const sure = confidence(this.body.tokens);
    if (sure !== null) facts.push(["Confidence ", percent(sure)]);
    if (this.ending) facts.push(["Ended: ", ENDINGS[this.ending] ?? this.ending]);
    if (this.first !== null) facts.push(["First token ", `${Math.round(this.first - this.begun)} ms`]);
    const seconds = (this.last - this.first) / 1000;
    if (this.numNew > 1 && seconds > 0) facts.push(["", `${((this.numNew - 1) / seconds).toFixed(0)} tokens/s`]);
    if (this.ids.length) facts.push(["", `${this.numPrompt === null ? "" : `${this.numPrompt} + `}${this.ids.length} tokens`]);
    this.facts.replaceChildren(...facts.map(([name, value]) => make("span", {}, name, make("b", {}, value))));
  }

  /** The answer in one sentence, for screen readers. */
  get summary() {
    const sure = confidence(this.body.tokens);
    return `${this.text || "No text."} (${ENDINGS[this.ending]}${sure === null ? "" : `, confidence ${percent(sure)}`})`;
  }
}
