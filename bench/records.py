"""What a load generator writes down: one record for each request, and what all figures are computed from."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TypeAlias


class Refused(Exception):
    """The server is full and said so."""


class Failed(Exception):
    """A request did not get its whole answer."""


class RunFailed(Exception):
    """A run that cannot be measured at all; the message is fit to be shown."""


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    REFUSED = "refused"  # the server said that it is full
    ERROR = "error"
    STOPPED = "stopped"  # by us, when a run was over


@dataclass(slots=True)
class Record:
    """One request. Times are seconds since the start of its run.

    `arrival_s` is when the request was due, which in an open loop may be before it could be sent: waiting for a slow
    generator counts as waiting. `token_s` has an entry for each message that brought tokens. `num_tokens` is what the
    server counted; an answer may have more tokens than messages.
    """

    arrival_s: float
    asked_tokens: int
    group: str = ""
    token_s: list[float] = field(default_factory=list)
    input_tokens: int = 0
    num_tokens: int = 0
    end_s: float = 0.0
    outcome: Outcome = Outcome.STOPPED
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token; None if none came, or nobody watched (whole answers)."""
        return self.token_s[0] - self.arrival_s if self.token_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for answers of one token or one message."""
        if len(self.token_s) < 2 or self.num_tokens < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between messages of this stream."""
        return [later - earlier for earlier, later in pairwise(self.token_s)]

    @property
    def latency_s(self) -> float:
        """From arrival to the end of the answer."""
        return self.end_s - self.arrival_s


@dataclass(slots=True)
class Run:
    """One run of a load. `marks` are moments that a plot should show, in seconds since the start.

    Without `is_streamed` nobody watched single tokens: there is no time to the first one, nor anything made from it.
    """

    records: list[Record] = field(default_factory=list)
    duration_s: float = 0.0
    generator_cpu_s: float = 0.0
    marks: dict[str, float] = field(default_factory=dict)
    is_streamed: bool = True

    def of(self, outcome: Outcome) -> list[Record]:
        """The records that ended so."""
        return [record for record in self.records if record.outcome is outcome]

    def errors(self) -> dict[str, int]:
        """What went wrong, and how often."""
        counts: dict[str, int] = {}
        for record in self.records:
            if record.error:
                counts[record.error] = counts.get(record.error, 0) + 1
        return counts


OnDone: TypeAlias = Callable[[Record], None]


class Books:
    """The records of a run in progress. Threads may share them."""

    def __init__(self, on_done: OnDone, *, is_streamed: bool = True) -> None:
        self._run = Run(is_streamed=is_streamed)
        self._on_done = on_done
        self._cpu_s = time.process_time()
        self._started = time.perf_counter()

    def now_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    @property
    def records(self) -> list[Record]:
        """All so far."""
        return self._run.records

    def mark(self, name: str) -> None:
        """Remember this moment."""
        self._run.marks[name] = self.now_s()

    @contextmanager
    def entry(self, asked_tokens: int, arrival_s: float, group: str = "") -> Iterator[Record]:
        """The record of one request, sent inside the block. Takes Refused and Failed as its outcome."""
        record = Record(arrival_s, asked_tokens, group)
        self._run.records.append(record)
        try:
            yield record
            record.outcome = Outcome.OK
        except Refused as refusal:
            record.outcome, record.error = Outcome.REFUSED, str(refusal)
        except Failed as failure:
            record.outcome, record.error = Outcome.ERROR, str(failure)
        finally:
            record.end_s = self.now_s()
            self._on_done(record)

    def close(self) -> Run:
        """The finished run."""
        self._run.duration_s = self.now_s()
        self._run.generator_cpu_s = time.process_time() - self._cpu_s
        return self._run
