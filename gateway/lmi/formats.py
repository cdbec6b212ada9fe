"""LMI's three wire formats. Clients written for one do not read the others, so the operator chooses: `lmi_schema`.

"rolling" is LMI's from 0.27 on, "0.26" the one before it, "async" that of its newest default.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from gateway.errors import Problem
from gateway.streaming import Json
from tandem import FinishReason, Token, Usage


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice has ended. `inputs` is its prompt."""

    reason: FinishReason
    usage: Usage
    inputs: str
    seed: int | None


class Format(Protocol):
    """One generation of the format."""

    def token(self, token: Token) -> Json:
        """A token in a list of tokens, and in a line."""
        ...

    def line(self, token: Json, rest: Json) -> Json:
        """A line of a stream; `rest` is empty but for the last one."""
        ...

    def details(self, ending: Ending) -> Json:
        """Details of a whole answer, before its tokens are added."""
        ...

    def last_details(self, ending: Ending) -> Json:
        """Details in the last line of a stream."""
        ...

    def failure(self, problem: Problem) -> Json:
        """The last line of a stream that has failed."""
        ...


class Rolling:
    """LMI 0.27 and newer, rolling batch."""

    def token(self, token: Token) -> Json:
        """`special_token` only where it is true."""
        body: Json = {"id": token.id, "text": token.text, "log_prob": token.logprob}
        return body | ({"special_token": True} if token.special else {})

    def line(self, token: Json, rest: Json) -> Json:
        """Nothing but the token, until the last one."""
        return {"token": token} | rest

    def details(self, ending: Ending) -> Json:
        """With the prompt."""
        return self.last_details(ending)

    def last_details(self, ending: Ending) -> Json:
        """The same as for a whole answer."""
        return {
            "finish_reason": ending.reason,
            "generated_tokens": ending.usage.completion_tokens,
            "inputs": ending.inputs,
        }

    def failure(self, problem: Problem) -> Json:
        """A token that is none, and a reason that is an error."""
        token = {"id": -1, "text": "", "log_prob": -1, "special_token": True, "error_msg": problem.message}
        return {"token": token, "generated_text": "", "details": {"finish_reason": "error", "generated_tokens": None}}


class Old(Rolling):
    """LMI 0.26: what is false, zero or empty is left out of a token."""

    def token(self, token: Token) -> Json:
        """Readers of this format expect absence."""
        return {name: value for name, value in super().token(token).items() if value}

    def last_details(self, ending: Ending) -> Json:
        """The reason only."""
        return {"finish_reason": ending.reason}


class Async:
    """LMI's newest default, which looks like TGI."""

    def token(self, token: Token) -> Json:
        """`logprob` in one word."""
        return {"id": token.id, "text": token.text, "logprob": token.logprob}

    def line(self, token: Json, rest: Json) -> Json:
        """All members in each line."""
        return {"index": 0, "token": token, "generated_text": None, "details": None} | rest

    def details(self, ending: Ending) -> Json:
        """Reasons are those of OpenAI."""
        return {
            "finish_reason": "length" if ending.reason is FinishReason.LENGTH else "stop",
            "generated_tokens": ending.usage.completion_tokens,
            "seed": ending.seed,
        }

    def last_details(self, ending: Ending) -> Json:
        """And how long the prompt was."""
        return self.details(ending) | {"input_length": ending.usage.prompt_tokens}

    def failure(self, problem: Problem) -> Json:
        """An error instead of a token."""
        return {"error": problem.message, "code": problem.row.lmi.status}


FORMATS: Mapping[str, Format] = MappingProxyType({"rolling": Rolling(), "0.26": Old(), "async": Async()})
