"""Answers to `inputs`, in any of the formats."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.answers import Answer
from gateway.errors import Problem
from gateway.lmi.formats import Ending, Format
from gateway.lmi.schemas import InvocationBody
from gateway.streaming import Json
from tandem import Choice, Token, TokenEvent


@dataclass(frozen=True, slots=True)
class Shape:
    """What of an answer is shown."""

    format: Format
    body: InvocationBody

    @property
    def details(self) -> bool:
        """True if they were asked for."""
        return bool(self.body.parameters.details) or self.body.parameters.wants_prefill

    def text(self, inputs: str, generated: str) -> str:
        """The prompt is put in front of the whole text only, never of a token."""
        return inputs + generated if self.body.parameters.return_full_text else generated

    def ending(self, choice: Choice, inputs: str) -> Ending:
        """How a complete choice has ended."""
        return Ending(choice.finish_reason, choice.usage, inputs, self.body.parameters.seed)

    def top_tokens(self, tokens: Iterable[Token]) -> list[list[Json]]:
        """The likeliest tokens at each place."""
        return [[self.format.token(Token(top.id, top.text, top.logprob)) for top in token.top] for token in tokens]


def answers_json(answer: Answer, shape: Shape) -> list[Json]:
    """One object for each input."""
    num_choices = shape.body.parameters.num_choices
    return [
        _answer(answer.choices[number * num_choices :][:num_choices], answer.prompt_tokens.get(number, ()), shape, text)
        for number, text in enumerate(shape.body.prompts)
    ]


def _answer(choices: Sequence[Choice], prompt: Sequence[Token], shape: Shape, inputs: str) -> Json:
    first, *others = choices
    body: Json = {"generated_text": shape.text(inputs, first.text)}
    if shape.details or others:
        body["details"] = _details(first, shape, inputs)
        if shape.body.parameters.wants_prefill:
            body["details"]["prefill"] = list(map(shape.format.token, prompt))
        if others:
            body["details"]["best_of_sequences"] = [
                {"generated_text": shape.text(inputs, other.text)} | _details(other, shape, inputs) for other in others
            ]
    return body


def _details(choice: Choice, shape: Shape, inputs: str) -> Json:
    details = shape.format.details(shape.ending(choice, inputs))
    details["tokens"] = list(map(shape.format.token, choice.tokens))
    if shape.body.parameters.num_top:
        details["top_tokens"] = shape.top_tokens(choice.tokens)
    return details


class Lines:
    """One line for each token, the last one with the whole text."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._inputs = shape.body.prompts[0]
        self._texts: list[str] = []

    def start(self) -> Iterable[Json]:
        """Nothing."""
        return ()

    def event(self, event: TokenEvent) -> Iterable[Json]:
        """Text that is held back leaves its token's text empty."""
        self._texts.append(event.text)
        if event.token is None:
            return
        token = self._shape.format.token(event.token)
        yield self._shape.format.line(token, self._top(event.token) | self._ending(event))

    def end(self) -> Iterable[Json]:
        """Nothing: the stream just closes."""
        return ()

    def error(self, problem: Problem) -> Iterable[Json]:
        """One line that says so."""
        yield self._shape.format.failure(problem)

    def _top(self, token: Token) -> Json:
        if not self._shape.body.parameters.num_top:
            return {}
        return {"top_tokens": self._shape.top_tokens([token])[0]}

    def _ending(self, event: TokenEvent) -> Json:
        if event.finish_reason is None or event.usage is None:
            return {}
        shape = self._shape
        rest: Json = {"generated_text": shape.text(self._inputs, "".join(self._texts))}
        if shape.details:
            ending = Ending(event.finish_reason, event.usage, self._inputs, shape.body.parameters.seed)
            rest["details"] = shape.format.last_details(ending)
        return rest
