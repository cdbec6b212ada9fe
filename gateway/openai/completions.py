"""POST /v1/completions."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from starlette.responses import JSONResponse, Response

from gateway.answers import Answer, collect, total_usage
from gateway.errors import Problem
from gateway.exchange import Exchange
from gateway.openai.envelope import Envelope, UsageOfStream, finish_reason, token_ids, usage_json, without_stops
from gateway.openai.errors import error_body
from gateway.openai.logprobs import CompletionLogprobs, TokensOfStream, shown_tokens
from gateway.openai.parameters import completion_arguments
from gateway.openai.schemas import CompletionBody
from gateway.schema import parse
from gateway.streaming import SSE_DONE, Framing, Json, Streamer
from tandem import Choice, FinishReason, Token, TokenEvent


async def completions(exchange: Exchange) -> Response:
    """The handler."""
    return await answer_completion(exchange, parse(CompletionBody, exchange.body), SSE_DONE)


async def answer_completion(exchange: Exchange, body: CompletionBody, framing: Framing) -> Response:
    """Answer as a whole, or as a stream if the body wants one. Raises InvalidRequest."""
    num_choices = body.n or 1
    envelope = Envelope.new("text_completion", "cmpl", body.model or exchange.served_name)
    feed = exchange.feed(completion_arguments(body, exchange.settings.max_client_batch_size), num_choices)
    if body.stream:
        return await Streamer(framing, exchange).respond(feed, CompletionChunks(body, envelope))
    return JSONResponse(completion_json(await collect(feed, num_choices), body, envelope))


def completion_json(answer: Answer, body: CompletionBody, envelope: Envelope) -> Json:
    """The whole answer."""
    num_choices = body.n or 1
    shown = tuple(map(_prompt_only, answer.choices)) if body.scores_only else without_stops(answer.choices)
    choices = [_choice(each, answer.prompt_tokens.get(each.index // num_choices, ()), body) for each in shown]
    return envelope.json(choices) | {"usage": usage_json(total_usage(shown, num_choices))}


def _prompt_only(choice: Choice) -> Choice:
    """Without the one token that had to be generated."""
    text = choice.text.removesuffix("".join(token.text for token in choice.tokens))
    usage = replace(choice.usage, completion_tokens=0)
    return replace(choice, text=text, tokens=(), finish_reason=FinishReason.LENGTH, usage=usage)


def _choice(choice: Choice, prompt_tokens: Sequence[Token], body: CompletionBody) -> Json:
    logprobs = None
    if body.logprobs is not None:
        tokens = (*prompt_tokens, *shown_tokens(choice.tokens, choice.finish_reason))
        logprobs = CompletionLogprobs().of(tokens, body.logprobs)
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": logprobs,
        "finish_reason": finish_reason(choice.finish_reason),
    } | token_ids(body, choice.tokens)


class CompletionChunks:
    """The answer as a stream; the choices of all prompts take turns."""

    def __init__(self, body: CompletionBody, envelope: Envelope) -> None:
        self._body = body
        self._envelope = envelope
        self._usage = UsageOfStream(body)
        self._tokens = TokensOfStream()
        self._prompts: dict[int, tuple[Token, ...]] = {}
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def start(self) -> Iterable[Json]:
        """Nothing."""
        return ()

    def event(self, event: TokenEvent) -> Iterable[Json]:
        """Nothing for a token whose text is held back, unless its id is wanted."""
        self._usage.saw(event)
        tokens = self._shown(event)
        wants_logprobs = self._body.logprobs is not None
        wants_tokens = (wants_logprobs and tokens) or (self._body.return_token_ids and event.token)
        if not (event.text or wants_tokens or event.finish_reason is not None):
            return
        logprobs = self._logprobs[event.index].of(tokens, self._body.logprobs or 0) if wants_logprobs else None
        reason = None if event.finish_reason is None else finish_reason(event.finish_reason)
        choice = {"index": event.index, "text": event.text, "logprobs": logprobs, "finish_reason": reason}
        choice |= token_ids(self._body, (event.token,) if event.token else ())
        yield self._envelope.json([choice]) | self._usage.of_chunk()

    def end(self) -> Iterable[Json]:
        """The usage, if it was asked for."""
        return self._usage.last_chunk(self._envelope)

    def error(self, problem: Problem) -> Iterable[Json]:
        """One object, which clients raise as an error."""
        yield error_body(problem)

    def _shown(self, event: TokenEvent) -> Sequence[Token]:
        """Tokens whose log-probs go with this event: the prompt's too, with a choice's first one."""
        prompt = event.index // (self._body.n or 1)
        if event.prompt_tokens:
            self._prompts[prompt] = event.prompt_tokens
        if event.index in self._logprobs:
            return self._tokens.shown_with(event)
        self._logprobs[event.index] = CompletionLogprobs()
        return (*self._prompts.get(prompt, ()), *self._tokens.shown_with(event))
