"""Prints a streamed answer: coloured tokens as they arrive, then one line of statistics."""

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import tandem
from tandem.models import confidence
from tandem_cli.colours import Painter


@dataclass
class StreamedAnswer:
    """The part of an answer that has arrived so far. Times are in seconds of the monotonic clock."""

    started_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    last_s: float | None = None
    request_id: str = ""
    texts: list[str] = field(default_factory=list)
    tokens: list[tandem.Token] = field(default_factory=list)
    finish_reason: str = "interrupted"

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, event: tandem.TokenEvent) -> None:
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
        """Time to first token, as this client saw it; None before it arrives."""
        return None if self.first_s is None else self.first_s - self.started_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first token; None for fewer than two tokens."""
        if len(self.tokens) < 2 or self.first_s is None or self.last_s is None:
            return None
        return (len(self.tokens) - 1) / max(self.last_s - self.first_s, 1e-9)

    @property
    def confidence(self) -> float | None:
        return confidence(self.tokens)

    def summary(self) -> str:
        """One line of statistics to print below the answer."""
        statistics = [self.finish_reason, f"{len(self.tokens)} tokens"]
        if self.confidence is not None:
            statistics.append(f"confidence {self.confidence:.2f}")
        if self.ttft_s is not None:
            statistics.append(f"first token {self.ttft_s * 1000:.0f} ms")
        if self.tokens_per_s is not None:
            statistics.append(f"{self.tokens_per_s:.1f} tokens/s")
        return " · ".join(statistics)


def show(events: Iterable[tandem.TokenEvent], answer: StreamedAnswer, painter: Painter) -> None:
    """Print the events to stdout as they arrive, and add each of them to `answer`."""
    for event in _recorded(events, answer):
        sys.stdout.write(painter.paint(event.echo, None))
        if event.token:
            sys.stdout.write(painter.paint(event.token.text, event.token.logprob))
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


def _recorded(events: Iterable[tandem.TokenEvent], answer: StreamedAnswer) -> Iterator[tandem.TokenEvent]:
    for event in events:
        answer.add(event)
        yield event
