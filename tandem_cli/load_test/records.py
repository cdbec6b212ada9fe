"""Records of a load test: one record per request, from which all figures are computed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TypeAlias


class Refused(Exception):
    """The server refused the request because it is overloaded."""


class Failed(Exception):
    """A request failed, or its answer is incomplete."""


class RunFailed(Exception):
    """A run cannot be measured at all. The message is meant for the user."""


class Outcome(StrEnum):
    """The outcome of a request in a load test."""

    OK = "ok"
    REFUSED = "refused"  # the server is overloaded
    ERROR = "error"
    STOPPED = "stopped"  # by the load generator, at the end of a run


@dataclass(slots=True)
class Record:
    """One request. Times are in seconds since the start of its run.

    `arrival_s` is the time at which the request was due. In an open loop it may be sent later; that delay counts as
    latency. `token_s` has the time of each message with tokens. `num_tokens` was counted by the server; an answer may
    have more tokens than messages. `asked_tokens` is the limit that the request had.
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
        """Seconds from arrival to the first token; None without a token, and for answers that were not streamed."""
        return self.token_s[0] - self.arrival_s if self.token_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for answers of one token or one message."""
        if len(self.token_s) < 2 or self.num_tokens < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive messages of the stream."""
        return [later - earlier for earlier, later in pairwise(self.token_s)]

    @property
    def latency_s(self) -> float:
        """Seconds from arrival to the end of the answer."""
        return self.end_s - self.arrival_s


@dataclass(slots=True)
class Run:
    """One run of a load. `marks` are named times for plots, in seconds since the start.

    Without `is_streamed`, token times were not observed, so that TTFT and figures based on it are missing.
    """

    records: list[Record] = field(default_factory=list)
    duration_s: float = 0.0
    generator_cpu_s: float = 0.0
    marks: dict[str, float] = field(default_factory=dict)
    is_streamed: bool = True

    def of(self, outcome: Outcome) -> list[Record]:
        """The records with this outcome."""
        return [record for record in self.records if record.outcome is outcome]

    def errors(self) -> dict[str, int]:
        """The number of requests per error message."""
        counts: dict[str, int] = {}
        for record in self.records:
            if record.error:
                counts[record.error] = counts.get(record.error, 0) + 1
        return counts


OnDone: TypeAlias = Callable[[Record], None]


class RunRecorder:
    """Collects the records of a run in progress. Threads may share it."""

    def __init__(self, on_done: OnDone, *, is_streamed: bool = True) -> None:
        self._run = Run(is_streamed=is_streamed)
        self._on_done = on_done
        self._cpu_s = time.process_time()
        self._started = time.perf_counter()

    def now_s(self) -> float:
        """Seconds since the start of the run."""
        return time.perf_counter() - self._started

    @property
    def records(self) -> list[Record]:
        return self._run.records

    def mark(self, name: str) -> None:
        """Set the mark `name` to the present time."""
        self._run.marks[name] = self.now_s()

    @contextmanager
    def entry(self, asked_tokens: int, arrival_s: float, group: str = "") -> Iterator[Record]:
        """Record the request that is sent inside the block. Refused and Failed become its outcome and are not
        raised.
        """
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
        """End the run and return it with its duration and CPU time."""
        self._run.duration_s = self.now_s()
        self._run.generator_cpu_s = time.process_time() - self._cpu_s
        return self._run
