"""Answers as TGI writes them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.answers import Answer
from gateway.errors import Problem
from gateway.streaming import Json
from gateway.tgi.errors import error_body
from tandem import Choice, FinishReason, Token, TokenEvent, TopToken, Usage


@dataclass(frozen=True, slots=True)
class Shape:
    """What of an answer is shown. `seed` is None if nothing was drawn, `prefix` goes before the generated text."""

    details: bool
    prefill: bool
    prefix: str
    seed: int | None
    top_tokens: bool
    max_new_tokens: int | None

    def finish_reason(self, reason: FinishReason, usage: Usage) -> str:
        """At the last token allowed it is the length, whatever the token is."""
        if reason is FinishReason.EOS_TOKEN and usage.completion_tokens == self.max_new_tokens:
            return FinishReason.LENGTH
        return reason

    def details_of(self, reason: FinishReason, usage: Usage) -> Json:
        """What whole answers and streams both tell about their end."""
        return {
            "finish_reason": self.finish_reason(reason, usage),
            "generated_tokens": usage.completion_tokens,
            "seed": self.seed,
        }


def answer_json(answer: Answer, shape: Shape) -> Json:
    """The whole answer: the best choice, and with the details all others."""
    first, *others = answer.choices
    prompt = answer.prompt_tokens.get(0, ()) if shape.prefill else ()
    body: Json = {"generated_text": shape.prefix + first.text}
    if shape.details:
        body["details"] = _details(first, prompt, shape)
        if others:
            body["details"]["best_of_sequences"] = [
                {"generated_text": shape.prefix + each.text} | _details(each, prompt, shape) for each in others
            ]
    return body


def _details(choice: Choice, prompt: Sequence[Token], shape: Shape) -> Json:
    details = shape.details_of(choice.finish_reason, choice.usage) | {
        "prefill": [{"id": each.id, "text": each.text, "logprob": each.logprob} for each in prompt],
        "tokens": list(map(token_json, choice.tokens)),
    }
    if shape.top_tokens:
        details["top_tokens"] = [top_json(each.top) for each in choice.tokens]
    return details


def token_json(token: Token) -> Json:
    """`special` is always there: strict clients want it."""
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}


def top_json(top: Sequence[TopToken]) -> list[Json]:
    """The likeliest tokens at one place."""
    return [{"id": each.id, "text": each.text, "logprob": each.logprob, "special": False} for each in top]


class StreamEvents:
    """One event for each token, the last one with the whole text."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._texts = [shape.prefix]
        self._num_tokens = 0

    def start(self) -> Iterable[Json]:
        """Nothing."""
        return ()

    def event(self, event: TokenEvent) -> Iterable[Json]:
        """Text that is held back leaves its token's text empty."""
        self._texts.append(event.text)
        if event.token is None:
            return
        self._num_tokens += 1
        body: Json = {"index": self._num_tokens, "token": token_json(event.token)}
        if self._shape.top_tokens:
            body["top_tokens"] = top_json(event.token.top)
        yield body | self._ending(event)

    def end(self) -> Iterable[Json]:
        """Nothing: the stream just closes."""
        return ()

    def error(self, problem: Problem) -> Iterable[Json]:
        """One object that clients raise."""
        yield error_body(problem)

    def _ending(self, event: TokenEvent) -> Json:
        if event.finish_reason is None or event.usage is None:
            return {"generated_text": None, "details": None}
        details = None
        if self._shape.details:
            ending = self._shape.details_of(event.finish_reason, event.usage)
            details = ending | {"input_length": event.usage.prompt_tokens}
        return {"generated_text": "".join(self._texts), "details": details}
