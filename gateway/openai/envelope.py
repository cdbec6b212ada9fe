"""What is around the choices: ids, times, token counts."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import tandem
from gateway.openai.logprobs import num_stop_tokens
from gateway.openai.schemas import SamplingBody
from tandem import Choice, FinishReason, Token, TokenEvent, Usage

Json = dict[str, Any]

# A text, not null: text-generation's client wants one.
_FINGERPRINT = f"tandem-{tandem.__version__}"


@dataclass(frozen=True, slots=True)
class Envelope:
    """The same for all chunks of an answer."""

    object: str
    id: str
    created: int
    model: str

    @classmethod
    def new(cls, kind: str, prefix: str, model: str) -> "Envelope":
        """A fresh id, now."""
        return cls(kind, f"{prefix}-{uuid4().hex}", int(time.time()), model)

    def as_chunk(self) -> "Envelope":
        """For the chunks of a chat, which are another kind of object."""
        return replace(self, object=f"{self.object}.chunk")

    def json(self, choices: list[Json]) -> Json:
        """The object with `choices`."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": _FINGERPRINT,
            "choices": choices,
        }


def finish_reason(reason: FinishReason) -> str:
    """OpenAI knows no difference between a stop string and the model's own end."""
    return "length" if reason is FinishReason.LENGTH else "stop"


def token_ids(body: SamplingBody, tokens: Iterable[Token]) -> Json:
    """The member `token_ids` of a choice, if it was asked for: what continues an answer exactly."""
    return {"token_ids": [token.id for token in tokens]} if body.return_token_ids else {}


def usage_json(usage: Usage) -> Json:
    """Token counts."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def without_stops(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Choices whose counts leave stop strings out."""
    return tuple(
        replace(choice, usage=_less(choice.usage, num_stop_tokens(choice.tokens, choice.finish_reason)))
        for choice in choices
    )


def _less(usage: Usage, num_tokens: int) -> Usage:
    return replace(usage, completion_tokens=usage.completion_tokens - num_tokens)


class UsageOfStream:
    """Token counts of a stream, without stop strings. What a prompt has is known at the end of its first choice."""

    def __init__(self, body: SamplingBody) -> None:
        options = body.stream_options
        self._is_wanted = options is not None and (options.include_usage or options.continuous_usage_stats)
        self._in_all = options is not None and options.continuous_usage_stats
        self._num_choices = body.n or 1
        self._sum = Usage()
        self._num_running = 0
        self._ends: dict[int, list[Token]] = {}  # of each choice, its last tokens without a text

    def saw(self, event: TokenEvent) -> None:
        """Count one event."""
        end = self._ends.setdefault(event.index, [])
        if event.token is not None:
            self._num_running += 1
            end[:] = [] if event.token.text else [*end, event.token]
        if event.usage is None:
            return
        num_stop = num_stop_tokens(end, event.finish_reason)
        self._num_running -= num_stop
        usage, is_first = _less(event.usage, num_stop), event.index % self._num_choices == 0
        self._sum = Usage(
            self._sum.prompt_tokens + (usage.prompt_tokens if is_first else 0),
            self._sum.completion_tokens + usage.completion_tokens,
            self._sum.cached_tokens + (usage.cached_tokens if is_first else 0),
        )

    def of_chunk(self) -> Json:
        """The member `usage` of a chunk: null until the last one, or the counts so far."""
        if not self._is_wanted:
            return {}
        so_far = replace(self._sum, completion_tokens=self._num_running)
        return {"usage": usage_json(so_far) if self._in_all else None}

    def last_chunk(self, envelope: Envelope) -> Iterable[Json]:
        """A chunk without choices, if counts were asked for."""
        if self._is_wanted:
            yield envelope.json([]) | {"usage": usage_json(self._sum)}
