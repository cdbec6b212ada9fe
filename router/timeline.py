"""Lifetime events of a request, for the access log, and the phases between them, for the client.

Events: queued, placed, prefill_started, prefill_finished, transfer_started, transfer_finished, decode_started,
first_token, finished. If replays repeat an event, the access log shows the first; phases are kept for each attempt.

Phases follow each other without gaps, so that they add up to the total:

    prepare   permit, template, tokens, limits; until the request is enqueued
    queue     until workers with capacity are found
    dispatch  until the prompt's first step begins: blocks reserved at the decode worker, the prefill worker's own queue
    prefill   until the first token has come. If the decode worker prefills itself, its dispatch and queue included
    transfer  until the KV is handed over: the part of the transfer that computing the prompt did not hide
    wait      until the decode worker's first token: the end of its running step, and the step after it
    decode    until the last token, or the attempt's failure
    backoff   after a failed attempt, until the next one is enqueued

A failed attempt's current phase ends with the failure; its later phases are zero.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from itertools import pairwise

_ENDS = ("placed", "prefill_started", "prefill_finished", "transfer_finished", "decode_started")
"""The event that ends each phase from queue to wait."""


@dataclass(slots=True)
class AttemptWorkers:
    """The names of one attempt's workers, "" without one, and the name of the error that it failed with."""

    prefill: str = ""
    decode: str = ""
    failure: str = ""


@dataclass(slots=True)
class AttemptEvents:
    """Events of one attempt, in seconds since the request arrived; "queued" is always present.

    `kv_transfer_s` is the sender's figure for the whole transfer, including the part while the prompt was computed.
    """

    at_s: dict[str, float] = field(default_factory=dict)
    ended_s: float | None = None
    kv_transfer_s: float | None = None
    workers: AttemptWorkers = field(default_factory=AttemptWorkers)


@dataclass(frozen=True, slots=True)
class AttemptPhases:
    """Seconds in each phase of an attempt."""

    queue_s: float
    dispatch_s: float
    prefill_s: float
    transfer_s: float
    wait_s: float
    decode_s: float
    backoff_s: float


PHASES = ("prepare", *(phase.name.removesuffix("_s") for phase in fields(AttemptPhases)))
"""The names of all phases, in order."""


@dataclass(frozen=True, slots=True)
class AttemptTiming:
    """Timing of one attempt. `kv_transfer_s`: from the transfer's opening to its commit; None without a transfer."""

    phases: AttemptPhases
    kv_transfer_s: float | None = None
    workers: AttemptWorkers = field(default_factory=AttemptWorkers)

    @property
    def total_s(self) -> float:
        return sum(astuple(self.phases))


@dataclass(frozen=True, slots=True)
class Timing:
    """Timing of a choice from its request's arrival to its last token; `first_token_s` is a point within it."""

    prepare_s: float
    first_token_s: float
    attempts: tuple[AttemptTiming, ...]

    @property
    def total_s(self) -> float:
        return self.prepare_s + sum(attempt.total_s for attempt in self.attempts)

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds by phase, in order, summed over attempts."""
        sums = map(sum, zip(*(astuple(attempt.phases) for attempt in self.attempts), strict=True))
        return dict(zip(PHASES, (self.prepare_s, *sums), strict=True))


def timing_of(attempts: Sequence[AttemptEvents], first_token_s: float) -> Timing:
    """Return the timing of at least one attempt, all ended."""
    begins = [attempt.at_s["queued"] for attempt in attempts]
    ended_at_s = [attempt.at_s["queued"] if attempt.ended_s is None else attempt.ended_s for attempt in attempts]
    backoffs = [begin - end for end, begin in zip(ended_at_s, begins[1:], strict=False)] + [0.0]
    timings = (
        AttemptTiming(_phases(attempt.at_s, end, backoff), attempt.kv_transfer_s, attempt.workers)
        for attempt, end, backoff in zip(attempts, ended_at_s, backoffs, strict=True)
    )
    return Timing(begins[0], first_token_s, tuple(timings))


def _phases(at_s: Mapping[str, float], ended_s: float, backoff_s: float) -> AttemptPhases:
    """Two workers report, so events may be missing or out of order: each phase ends no later than the next."""
    phase_ends_s = [ended_s]
    for event in reversed(_ENDS):
        phase_ends_s.append(max(at_s["queued"], min(at_s.get(event, ended_s), phase_ends_s[-1])))
    points = [at_s["queued"], *reversed(phase_ends_s), ended_s + backoff_s]
    return AttemptPhases(*(end - begin for begin, end in pairwise(points)))


class Timeline:
    """Times in seconds since the request arrived. `on_gap` is called with each gap between tokens, in seconds."""

    def __init__(self, clock: Callable[[], float], on_gap: Callable[[float], None] | None = None) -> None:
        self._clock = clock
        self._on_gap = on_gap
        self._last_token_s: float | None = None
        self._begin_s = clock()
        self._events: dict[str, float] = {}
        self._attempts: list[AttemptEvents] = []
        self._current = AttemptEvents()

    def begin_attempt(self) -> None:
        """Start a new attempt, which is queued now."""
        self._current = AttemptEvents()
        self._attempts.append(self._current)
        self.mark("queued")

    def note_workers(self, prefill: str, decode: str) -> None:
        """Record the attempt's workers; "" without a prefill worker."""
        self._current.workers.prefill, self._current.workers.decode = prefill, decode

    def end_attempt(self, failure: str = "") -> None:
        """The attempt has failed or finished now. Only the first call counts."""
        if self._current.ended_s is None:
            self._current.ended_s = self.age_s
            self._current.workers.failure = failure

    def mark(self, event: str, *, ago_s: float = 0.0) -> None:
        """Record that an event happens now, or happened `ago_s` ago. Only the first one per attempt counts."""
        if event not in self._current.at_s:
            at_s = max(0.0, self.age_s - ago_s)
            self._current.at_s[event] = at_s
            self._events.setdefault(event, at_s)

    def tokens_received(self, at_s: float) -> None:
        """Record tokens that have come together, at `at_s` on the clock."""
        last_s, self._last_token_s = self._last_token_s, at_s
        if last_s is None:
            self.mark("first_token")
        elif self._on_gap is not None:
            self._on_gap(at_s - last_s)

    def note_kv_transfer(self, duration_s: float) -> None:
        """Record how long the attempt's KV transfer took, as its sender has measured it."""
        self._current.kv_transfer_s = duration_s

    @property
    def age_s(self) -> float:
        """Seconds since the request arrived."""
        return self._clock() - self._begin_s

    @property
    def events_s(self) -> dict[str, float]:
        """The first time of each event."""
        return dict(self._events)

    def timing(self) -> Timing | None:
        """Return the timing so far, of the last attempt up to its end; None before the choice is enqueued."""
        if not self._attempts:
            return None
        now_s = self.age_s
        current = self._current if self._current.ended_s is not None else replace(self._current, ended_s=now_s)
        return timing_of([*self._attempts[:-1], current], self._events.get("first_token", now_s))

    def as_fields(self) -> dict[str, float]:
        """Return `{event_ms: milliseconds}`, in order, and the number of attempts."""
        times = {f"{event}_ms": round(at_s * 1000, 2) for event, at_s in self._events.items()}
        return {**times, "attempts": len(self._attempts)}

    def copy(self) -> "Timeline":
        """Return a timeline for another choice of the same request, before it is enqueued."""
        copy = Timeline(self._clock, self._on_gap)
        copy._begin_s = self._begin_s
        return copy
