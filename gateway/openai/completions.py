"""POST /v1/completions."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from starlette.responses import JSONResponse, Response

from gateway.answers import SSE_DONE, Answer, Framing, collect, stream_answer, total_usage
from gateway.errors import Problem, openai_error_body
from gateway.exchange import Exchange
from gateway.openai.completion_members import (
    CompletionLogprobs,
    Envelope,
    StreamTokens,
    StreamUsage,
    finish_reason,
    token_ids,
    usage_json,
    visible_tokens,
    without_stop_tokens,
)
from gateway.openai.requests import ClientFieldNames, CompletionBody, check_ranges
from gateway.openai.sdk_arguments import completion_arguments
from gateway.schema import Json
from tandem import Choice, FinishReason, Token, TokenEvent


async def completions(exchange: Exchange) -> Response:
    return await answer_completion(exchange, await exchange.parse(CompletionBody), SSE_DONE)


async def answer_completion(exchange: Exchange, body: CompletionBody, framing: Framing) -> Response:
    """Answer as one body, or as a stream if the request says so. Raises InvalidRequest."""
    check_ranges(body)
    field_names = ClientFieldNames.of(body)
    num_choices = body.n or 1
    envelope = Envelope.new("text_completion", "cmpl", body.model or exchange.served_name)
    with field_names.translating_errors():
        max_prompts = exchange.settings.max_client_batch_size
        feed = exchange.feed(completion_arguments(body, exchange.model(body.model), max_prompts), num_choices)
        if body.stream:
            return await stream_answer(exchange, feed, CompletionChunks(body, envelope, field_names), framing)
        return JSONResponse(completion_json(await collect(feed, num_choices), body, envelope))


def completion_json(answer: Answer, body: CompletionBody, envelope: Envelope) -> Json:
    num_choices = body.n or 1
    choices = tuple(map(_prompt_only, answer.choices)) if body.scores_only else without_stop_tokens(answer.choices)
    rendered = [_choice(choice, answer.prompt_tokens.get(choice.index // num_choices, ()), body) for choice in choices]
    return envelope.json(rendered) | {"usage": usage_json(total_usage(choices, num_choices))}


def _prompt_only(choice: Choice) -> Choice:
    """Drop the one token that had to be generated, so that only the prompt is scored."""
    text = choice.text.removesuffix("".join(token.text for token in choice.tokens))
    usage = replace(choice.usage, completion_tokens=0)
    return replace(choice, text=text, tokens=(), finish_reason=FinishReason.LENGTH, usage=usage)


def _choice(choice: Choice, prompt_tokens: Sequence[Token], body: CompletionBody) -> Json:
    """With `echo` the tokens that ended the answer have log-probs, too: clients that score a prompt ask for one token
    more, and drop the last entry whatever that token was.
    """
    logprobs = None
    if body.logprobs is not None:
        generated = choice.tokens if body.echo else visible_tokens(choice)
        logprobs = CompletionLogprobs(body).of((*prompt_tokens, *generated))
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": logprobs,
        "finish_reason": finish_reason(choice.finish_reason),
    } | token_ids(body, choice.tokens)


class CompletionChunks:
    """Renders a stream in which the chunks of all choices of all prompts are interleaved."""

    def __init__(self, body: CompletionBody, envelope: Envelope, field_names: ClientFieldNames) -> None:
        self._body = body
        self._field_names = field_names
        self._envelope = envelope
        self._usage = StreamUsage(body)
        self._tokens = StreamTokens(keeps_end=body.echo)
        self._prompts: dict[int, tuple[Token, ...]] = {}
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def start(self) -> Iterable[Json]:
        return ()

    def event(self, event: TokenEvent) -> Iterable[Json]:
        """Render one event. A token whose text is held back gives no chunk, unless token ids are requested."""
        self._usage.add_prompt(event)
        self._usage.add(event)
        tokens = self._logprob_tokens(event)
        wants_logprobs = self._body.logprobs is not None
        wants_tokens = (wants_logprobs and tokens) or (self._body.return_token_ids and event.token)
        if not (event.text or wants_tokens or event.finish_reason is not None):
            return
        logprobs = self._logprobs[event.index].of(tokens) if wants_logprobs else None
        reason = None if event.finish_reason is None else finish_reason(event.finish_reason)
        choice = {"index": event.index, "text": event.text, "logprobs": logprobs, "finish_reason": reason}
        choice |= token_ids(self._body, (event.token,) if event.token else ())
        yield self._envelope.json([choice]) | self._usage.chunk_member()

    def end(self) -> Iterable[Json]:
        return self._usage.last_chunk(self._envelope)

    def error(self, problem: Problem) -> Iterable[Json]:
        yield openai_error_body(self._field_names.translate(problem))

    def _logprob_tokens(self, event: TokenEvent) -> Sequence[Token]:
        """Tokens whose log-probs belong to this event. A choice's first event also has those of its prompt."""
        prompt = event.index // (self._body.n or 1)
        if event.prompt_tokens:
            self._prompts[prompt] = event.prompt_tokens
        if event.index in self._logprobs:
            return self._tokens.take(event)
        self._logprobs[event.index] = CompletionLogprobs(self._body)
        return (*self._prompts.get(prompt, ()), *self._tokens.take(event))
