"""Showing an answer as it comes: coloured tokens, then one line of facts."""

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import tandem
from cli.colours import Painter
from tandem.models import confidence


@dataclass
class Answer:
    """What has come of one answer so far. Times are monotonic seconds."""

    started_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    last_s: float | None = None
    request_id: str = ""
    texts: list[str] = field(default_factory=list)
    tokens: list[tandem.Token] = field(default_factory=list)
    finish_reason: str = "interrupted"

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.texts)

    def add(self, event: tandem.TokenEvent) -> None:
        """Take one event in."""
        self.last_s = time.monotonic()
        self.first_s = self.first_s or self.last_s
        self.request_id = event.request_id
        self.texts.append(event.text)
        if event.token:
            self.tokens.append(event.token)
        if event.finish_reason:
            self.finish_reason = event.finish_reason

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_s is None else self.first_s - self.started_s

    @property
    def tokens_per_s(self) -> float | None:
        """Speed behind the first token; None for fewer than two tokens."""
        if len(self.tokens) < 2 or self.first_s is None or self.last_s is None:
            return None
        return (len(self.tokens) - 1) / max(self.last_s - self.first_s, 1e-9)

    @property
    def confidence(self) -> float | None:
        """exp(mean log-prob)."""
        return confidence(self.tokens)

    def facts(self) -> str:
        """The line under an answer."""
        parts = [self.finish_reason, f"{len(self.tokens)} tokens"]
        if self.confidence is not None:
            parts.append(f"confidence {self.confidence:.2f}")
        if self.ttft_s is not None:
            parts.append(f"first token {self.ttft_s * 1000:.0f} ms")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        return " · ".join(parts)


def show(events: Iterable[tandem.TokenEvent], answer: Answer, painter: Painter) -> None:
    """Write the events to stdout as they come, and into `answer`."""
    for event in _recorded(events, answer):
        sys.stdout.write(painter.paint(event.echo, None))
        if event.token:
            sys.stdout.write(painter.paint(event.token.text, event.token.logprob))
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


def _recorded(events: Iterable[tandem.TokenEvent], answer: Answer) -> Iterator[tandem.TokenEvent]:
    for event in events:
        answer.add(event)
        yield event
