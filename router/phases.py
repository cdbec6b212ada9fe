"""Where a request's time went: phases that follow each other, so that they add up to the whole. No I/O, no clock.

    prepare   permit, template, tokens, limits; until the request stands in the queue
    queue     until workers with room are found
    dispatch  until the prompt's first pass begins: blocks reserved at the decode worker, the prefill worker's own queue
    prefill   until its first token is here. A decode worker that prefills by itself: dispatch and its queue included
    transfer  until the KV is handed over: what of the transfer was not hidden behind computing
    wait      until the decode worker's first token: for its running step to end, and for the step after it
    decode    until the last token, or the attempt's failure
    backoff   after a failed attempt, until the next one stands in the queue

An attempt that fails does so in some phase, which then lasts until the failure; the phases after it are zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from itertools import pairwise

_ENDS = ("placed", "prefill_started", "prefill_finished", "transfer_finished", "decode_started")
"""The event that ends each phase from queue to wait."""


@dataclass(slots=True)
class AttemptEvents:
    """What happened to one attempt, in seconds since the request came in; "queued" is always there. `kv_transfer_s` is
    the sender's own figure for the whole transfer, also while the prompt was computed."""

    at_s: dict[str, float] = field(default_factory=dict)
    ended_s: float | None = None
    kv_transfer_s: float | None = None


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


PHASES = ("prepare", *(each.name.removesuffix("_s") for each in fields(AttemptPhases)))
"""All, in order."""


@dataclass(frozen=True, slots=True)
class AttemptTiming:
    """One attempt. `kv_transfer_s`: from the transfer's opening to its commit; None if there was none."""

    phases: AttemptPhases
    kv_transfer_s: float | None = None

    @property
    def total_s(self) -> float:
        """All phases."""
        return sum(astuple(self.phases))


@dataclass(frozen=True, slots=True)
class Timing:
    """A choice from its request's arrival to its last token. `first_token_s` is a point in it."""

    prepare_s: float
    first_token_s: float
    attempts: tuple[AttemptTiming, ...]

    @property
    def total_s(self) -> float:
        """All phases of all attempts."""
        return self.prepare_s + sum(attempt.total_s for attempt in self.attempts)

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds by phase, in order, summed over attempts."""
        sums = map(sum, zip(*(astuple(attempt.phases) for attempt in self.attempts), strict=True))
        return dict(zip(PHASES, (self.prepare_s, *sums), strict=True))


def timing_of(attempts: Sequence[AttemptEvents], first_token_s: float) -> Timing:
    """Phases of attempts that have all ended; there is at least one."""
    begins = [attempt.at_s["queued"] for attempt in attempts]
    ends = [attempt.at_s["queued"] if attempt.ended_s is None else attempt.ended_s for attempt in attempts]
    backoffs = [begin - end for end, begin in zip(ends, begins[1:], strict=False)] + [0.0]
    timings = (
        AttemptTiming(_phases(attempt.at_s, end, backoff), attempt.kv_transfer_s)
        for attempt, end, backoff in zip(attempts, ends, backoffs, strict=True)
    )
    return Timing(begins[0], first_token_s, tuple(timings))


def _phases(at_s: Mapping[str, float], ended_s: float, backoff_s: float) -> AttemptPhases:
    """Two workers report, so events may be missing or come in another order: none ends later than those after it."""
    ends = [ended_s]
    for event in reversed(_ENDS):
        ends.append(max(at_s["queued"], min(at_s.get(event, ended_s), ends[-1])))
    points = [at_s["queued"], *reversed(ends), ended_s + backoff_s]
    return AttemptPhases(*(end - begin for begin, end in pairwise(points)))
