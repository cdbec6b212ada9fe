"""LMI's three wire formats. Clients of one cannot read the others, so the operator chooses by `lmi_schema`.

"rolling" is the format of LMI 0.27 and later, "0.26" the one before it, "async" that of LMI's newest default engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from gateway.errors import Problem
from gateway.schema import Json
from tandem import FinishReason, Token, Usage


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a choice. `inputs` is its prompt."""

    reason: FinishReason
    usage: Usage
    inputs: str
    seed: int | None


class Format(Protocol):
    """One of the wire formats."""

    def token(self, token: Token) -> Json:
        """Render a token, for the details and for lines."""
        ...

    def line(self, token: Json, final: Json) -> Json:
        """Render a line of a stream. `final` has the members of the last line, and is empty before."""
        ...

    def details(self, ending: Ending) -> Json:
        """Render the details of a complete answer, without its tokens."""
        ...

    def last_details(self, ending: Ending) -> Json:
        """Render the details in the last line of a stream."""
        ...

    def failure(self, problem: Problem) -> Json:
        """Render the last line of a failed stream."""
        ...


class RollingBatch:
    """LMI 0.27 and later with rolling batch."""

    def token(self, token: Token) -> Json:
        body: Json = {"id": token.id, "text": token.text, "log_prob": token.logprob}
        return body | ({"special_token": True} if token.special else {})

    def line(self, token: Json, final: Json) -> Json:
        return {"token": token} | final

    def details(self, ending: Ending) -> Json:
        return self.last_details(ending)

    def last_details(self, ending: Ending) -> Json:
        return {
            "finish_reason": ending.reason,
            "generated_tokens": ending.usage.completion_tokens,
            "inputs": ending.inputs,
        }

    def failure(self, problem: Problem) -> Json:
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


FORMATS: Mapping[str, Format] = MappingProxyType({"rolling": RollingBatch(), "0.26": Lmi026(), "async": Async()})
