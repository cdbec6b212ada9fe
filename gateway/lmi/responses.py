"""Renders answers to `inputs` in one of LMI's three wire formats.

Clients of one format cannot read the others, so the operator chooses by `lmi_schema`: "rolling" is the format of LMI
0.27 and later, "0.26" the one before it, "async" that of LMI's newest default engine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gateway.answers import Answer, OwnTexts
from gateway.errors import Problem
from gateway.lmi.requests import InvocationBody
from gateway.schema import Json
from tandem import Choice, FinishReason, Token, TokenEvent, Usage

_NO_TOKEN = Token(-1, "", 0.0)
_NOTHING_YET: Json = {"generated_text": None, "details": None}


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a choice. `inputs` is its prompt."""

    reason: FinishReason
    usage: Usage
    inputs: str
    seed: int | None


class RollingBatch:
    """LMI 0.27 and later with rolling batch. The other formats have the same methods."""

    def token(self, token: Token) -> Json:
        """Render a token, for the details and for lines."""
        body: Json = {"id": token.id, "text": token.text, "log_prob": token.logprob}
        return body | ({"special_token": True} if token.special else {})

    def line(self, token: Json, final: Json) -> Json:
        """Render a line of a stream. `final` has the members of the last line, and is empty before."""
        return {"token": token} | final

    def details(self, ending: Ending) -> Json:
        """Render the details of a complete answer, without its tokens."""
        return self.last_details(ending)

    def last_details(self, ending: Ending) -> Json:
        """Render the details in the last line of a stream."""
        return {
            "finish_reason": ending.reason,
            "generated_tokens": ending.usage.completion_tokens,
            "inputs": ending.inputs,
        }

    def failure(self, problem: Problem) -> Json:
        """Render the last line of a failed stream."""
        token = {"id": -1, "text": "", "log_prob": -1, "special_token": True, "error_msg": problem.message}
        return {"token": token, "generated_text": "", "details": {"finish_reason": "error", "generated_tokens": None}}


class Lmi026(RollingBatch):
    """LMI 0.26. A token has no false, zero or empty members, except its log-prob, which clients always read."""

    def token(self, token: Token) -> Json:
        return {name: value for name, value in super().token(token).items() if value or name == "log_prob"}

    def last_details(self, ending: Ending) -> Json:
        return {"finish_reason": ending.reason}


class Async:
    """LMI's newest default, similar to TGI. Tokens have `logprob`, and `log_prob` for clients of the other formats."""

    def token(self, token: Token) -> Json:
        """`logprob` in one word, and `log_prob` for clients of the other formats."""
        return {"id": token.id, "text": token.text, "logprob": token.logprob, "log_prob": token.logprob}

    def line(self, token: Json, final: Json) -> Json:
        return {"index": 0, "token": token, "generated_text": None, "details": None} | final

    def details(self, ending: Ending) -> Json:
        return {
            "finish_reason": "length" if ending.reason is FinishReason.LENGTH else "stop",
            "generated_tokens": ending.usage.completion_tokens,
            "seed": ending.seed,
        }

    def last_details(self, ending: Ending) -> Json:
        return self.details(ending) | {"input_length": ending.usage.prompt_tokens}

    def failure(self, problem: Problem) -> Json:
        return {"error": problem.message, "code": problem.row.lmi.status}


Format = RollingBatch | Async
FORMATS: Mapping[str, Format] = MappingProxyType({"rolling": RollingBatch(), "0.26": Lmi026(), "async": Async()})


@dataclass(frozen=True, slots=True)
class LmiShape:
    """The form of an answer: the wire format, and the options in the request's body."""

    format: Format
    body: InvocationBody

    @property
    def details(self) -> bool:
        return bool(self.body.parameters.details) or self.body.parameters.wants_prefill

    def text(self, inputs: str, generated: str) -> str:
        """Return the text, with its prompt in front if `return_full_text` is set."""
        return inputs + generated if self.body.parameters.return_full_text else generated

    def ending(self, choice: Choice, inputs: str) -> Ending:
        return Ending(choice.finish_reason, choice.usage, inputs, self.body.parameters.seed)

    def top_tokens(self, tokens: Iterable[Token]) -> list[list[Json]]:
        """Render the likeliest tokens at each position."""
        return [[self.format.token(Token(top.id, top.text, top.logprob)) for top in token.top] for token in tokens]


def answers_json(answer: Answer, shape: LmiShape) -> list[Json]:
    """Render a complete answer: one object per input."""
    num_choices = shape.body.parameters.num_choices
    return [
        _answer(answer.choices[number * num_choices :][:num_choices], answer.prompt_tokens.get(number, ()), shape, text)
        for number, text in enumerate(shape.body.prompts)
    ]


def _answer(choices: Sequence[Choice], prompt: Sequence[Token], shape: LmiShape, inputs: str) -> Json:
    first, *alternatives = choices
    body: Json = {"generated_text": shape.text(inputs, first.text)}
    if shape.details or alternatives:
        body["details"] = _details(first, shape, inputs)
        if shape.body.parameters.wants_prefill:
            body["details"]["prefill"] = list(map(shape.format.token, prompt))
        if alternatives:
            body["details"]["best_of_sequences"] = [
                {"generated_text": shape.text(inputs, other.text)} | _details(other, shape, inputs)
                for other in alternatives
            ]
    return body


def _details(choice: Choice, shape: LmiShape, inputs: str) -> Json:
    details = shape.format.details(shape.ending(choice, inputs))
    details["tokens"] = list(map(shape.format.token, OwnTexts.of(choice.tokens)))
    if shape.body.parameters.num_top:
        details["top_tokens"] = shape.top_tokens(choice.tokens)
    return details


class Lines:
    """Renders a stream: one line per token, the last one with the complete text.

    With `closing_line`, as clients of LMI 0.26 read it: each line has `generated_text` and `details`, the last token's
    line has the details, and a line without token text (null) follows with `generated_text`.
    """

    def __init__(self, shape: LmiShape, *, closing_line: bool = False) -> None:
        self._shape = shape
        self._closing_line = closing_line
        self._inputs = shape.body.prompts[0]
        self._texts: list[str] = []

    def start(self) -> Iterable[Json]:
        return ()

    def event(self, event: TokenEvent) -> Iterable[Json]:
        """Render one event. Held-back text makes the token's text empty."""
        self._texts.append(event.text)
        ending = self._ending(event)
        if event.token is None and not ending:
            return
        shape, token = self._shape, event.token or _NO_TOKEN
        token_body = shape.format.token(token)
        if not self._closing_line:
            yield shape.format.line(token_body, self._top(token) | ending)
            return
        details = {"details": ending["details"]} if ending else {}
        yield shape.format.line(token_body | {"text": token.text}, _NOTHING_YET | self._top(token) | details)
        if ending:
            yield shape.format.line(shape.format.token(_NO_TOKEN) | {"text": None}, _NOTHING_YET | ending)

    def end(self) -> Iterable[Json]:
        return ()

    def error(self, problem: Problem) -> Iterable[Json]:
        yield self._shape.format.failure(problem)

    def _top(self, token: Token) -> Json:
        if not self._shape.body.parameters.num_top:
            return {}
        return {"top_tokens": self._shape.top_tokens([token])[0]}

    def _ending(self, event: TokenEvent) -> Json:
        if event.finish_reason is None or event.usage is None:
            return {}
        shape = self._shape
        final: Json = {"generated_text": shape.text(self._inputs, "".join(self._texts))}
        if shape.details:
            ending = Ending(event.finish_reason, event.usage, self._inputs, shape.body.parameters.seed)
            final["details"] = shape.format.last_details(ending)
        return final
