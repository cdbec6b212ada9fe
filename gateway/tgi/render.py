"""Renders answers in TGI's format."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.answers import Answer
from gateway.errors import Problem, tgi_error_body
from gateway.schema import Json
from tandem import Choice, FinishReason, Token, TokenEvent, TopToken, Usage


@dataclass(frozen=True, slots=True)
class TgiShape:
    """How to render an answer. `seed` is None for greedy decoding. `prefix` goes before the generated text."""

    details: bool
    prefill: bool
    prefix: str
    seed: int | None
    top_tokens: bool
    max_new_tokens: int | None

    def finish_reason(self, reason: FinishReason, usage: Usage) -> str:
        """Return TGI's reason: `length` at `max_new_tokens`, even if the last token is the end-of-sequence token."""
        if reason is FinishReason.EOS_TOKEN and usage.completion_tokens == self.max_new_tokens:
            return FinishReason.LENGTH
        return reason

    def details_of(self, reason: FinishReason, usage: Usage) -> Json:
        """Details of the end of an answer, for complete answers and for streams."""
        return {
            "finish_reason": self.finish_reason(reason, usage),
            "generated_tokens": usage.completion_tokens,
            "seed": self.seed,
        }


def answer_json(answer: Answer, shape: TgiShape) -> Json:
    """Render a complete answer: the best choice, and the others in its details."""
    first, *others = answer.choices
    prompt = answer.prompt_tokens.get(0, ()) if shape.prefill else ()
    body: Json = {"generated_text": shape.prefix + first.text}
    if shape.details:
        body["details"] = _details(first, prompt, shape)
        if others:
            body["details"]["best_of_sequences"] = [
                {"generated_text": shape.prefix + other.text} | _details(other, prompt, shape) for other in others
            ]
    return body


def _details(choice: Choice, prompt: Sequence[Token], shape: TgiShape) -> Json:
    details = shape.details_of(choice.finish_reason, choice.usage) | {
        "prefill": [{"id": token.id, "text": token.text, "logprob": token.logprob} for token in prompt],
        "tokens": list(map(token_json, choice.tokens)),
    }
    if shape.top_tokens:
        details["top_tokens"] = [top_json(token.top) for token in choice.tokens]
    return details


def token_json(token: Token) -> Json:
    """Render a token. `special` is always present, because strict clients require it."""
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}


def top_json(top: Sequence[TopToken]) -> list[Json]:
    """Render the likeliest tokens at one position."""
    return [{"id": token.id, "text": token.text, "logprob": token.logprob, "special": False} for token in top]


class StreamEvents:
    """Renders a stream: one event per token, the last one with the complete text."""

    def __init__(self, shape: TgiShape) -> None:
        self._shape = shape
        self._texts = [shape.prefix]
        self._num_tokens = 0

    def start(self) -> Iterable[Json]:
        return ()

    def event(self, event: TokenEvent) -> Iterable[Json]:
        """Render one event. Held-back text makes the token's text empty."""
        self._texts.append(event.text)
        if event.token is None:
            return
        self._num_tokens += 1
        body: Json = {"index": self._num_tokens, "token": token_json(event.token)}
        if self._shape.top_tokens:
            body["top_tokens"] = top_json(event.token.top)
        yield body | self._ending(event)

    def end(self) -> Iterable[Json]:
        return ()

    def error(self, problem: Problem) -> Iterable[Json]:
        yield tgi_error_body(problem)

    def _ending(self, event: TokenEvent) -> Json:
        if event.finish_reason is None or event.usage is None:
            return {"generated_text": None, "details": None}
        details = None
        if self._shape.details:
            ending = self._shape.details_of(event.finish_reason, event.usage)
            details = ending | {"input_length": event.usage.prompt_tokens}
        return {"generated_text": "".join(self._texts), "details": details}
