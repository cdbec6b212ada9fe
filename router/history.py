"""The work of a router over time: rates, waiting times and memory of the last day, for operators.

A reading every 5 seconds becomes a point. Older points are kept merged, so that a day takes about a megabyte.
Percentiles are those of bucket counts, interpolated. Pure but for `run`; `clock` returns monotonic seconds.
"""

import asyncio
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mesh.domain.worker import WorkerRole
from mesh.metrics import GAP_SECONDS, FastHistogram
from router.journal import Incident, Journal, Trace
from router.model_router import ModelRouter

STEP_S = 5.0
_FIRST_TOKEN_SECONDS = tuple(0.001 * 2 ** (quarter / 4) for quarter in range(81))  # to 1,049 s
_LEVELS = ((1, 360), (12, 360), (60, 288))  # points of so many readings, so many of them: 30 min, 6 h, a day


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters so far, and the state now. Token counters are by incarnation of a worker, gaps by bucket."""

    at_s: float
    generated_tokens: Mapping[str, int]
    computed_tokens: Mapping[str, int]
    gaps: Sequence[int]
    replays: int
    failed: int
    waiting: int
    running: int
    kv_used: float | None


@dataclass(frozen=True, slots=True)
class Point:
    """A stretch of time that ended at `at_s`. `waiting` and `running` are mean numbers of choices: in the queue, and
    with a permit elsewhere. `kv_used` is the mean use of the KV memory of decode workers, in [0, 1], None without any.
    """

    at_s: float
    seconds: float
    generated_tokens: int
    computed_tokens: int
    replays: int
    failed: int
    waiting: float
    running: float
    kv_used: float | None
    first_tokens: Counter[int] = field(default_factory=Counter)
    gaps: Counter[int] = field(default_factory=Counter)

    def first_token_s(self, share: float) -> float | None:
        """Percentile of the time from a request's arrival to its first token; None without one."""
        return percentile(self.first_tokens, _FIRST_TOKEN_SECONDS, share)

    def gap_s(self, share: float) -> float | None:
        """Percentile of the gaps between tokens; None without any."""
        return percentile(self.gaps, GAP_SECONDS, share)


def percentile(counts: Mapping[int, int], bounds: Sequence[float], share: float) -> float | None:
    """The value below which `share` of the values lie; `counts` are by index of the upper bound. None without values.

    Within a bucket values count as evenly spread; beyond the last bound they count as that bound.
    """
    if not (total := sum(counts.values())):
        return None
    rank, below = share * total, 0
    for bucket in sorted(counts):
        if below + counts[bucket] >= rank and counts[bucket]:
            if bucket >= len(bounds):
                return bounds[-1]
            low = bounds[bucket - 1] if bucket else 0.0
            return low + (bounds[bucket] - low) * (rank - below) / counts[bucket]
        below += counts[bucket]
    return bounds[-1]


def merged(points: Sequence[Point]) -> Point:
    """One point for the time of several, which follow each other."""
    seconds = sum(point.seconds for point in points)

    def mean(values: Iterable[tuple[float, float]]) -> float:
        weighed = list(values)
        return sum(value * weight for value, weight in weighed) / sum(weight for _, weight in weighed)

    measured = [(point.kv_used, point.seconds) for point in points if point.kv_used is not None]
    return Point(
        at_s=points[-1].at_s,
        seconds=seconds,
        generated_tokens=sum(point.generated_tokens for point in points),
        computed_tokens=sum(point.computed_tokens for point in points),
        replays=sum(point.replays for point in points),
        failed=sum(point.failed for point in points),
        waiting=mean((point.waiting, point.seconds) for point in points),
        running=mean((point.running, point.seconds) for point in points),
        kv_used=mean(measured) if measured else None,
        first_tokens=sum((point.first_tokens for point in points), Counter()),
        gaps=sum((point.gaps for point in points), Counter()),
    )


class _Level:
    """Points of `num_readings` readings each, and those of a point that is not complete."""

    def __init__(self, num_readings: int, num_points: int) -> None:
        self.span_s = num_readings * num_points * STEP_S
        self._num_readings = num_readings
        self._points: deque[Point] = deque(maxlen=num_points)
        self._parts: list[Point] = []

    def add(self, point: Point) -> None:
        self._parts.append(point)
        if len(self._parts) == self._num_readings:
            self._points.append(merged(self._parts))
            self._parts.clear()

    def points(self) -> list[Point]:
        return [*self._points, *([merged(self._parts)] if self._parts else [])]


class History:
    """The last day of a router, as points. A JournalReader: it counts the first tokens of choices as they end."""

    def __init__(self) -> None:
        self._levels = [_Level(*level) for level in _LEVELS]
        self._last: Reading | None = None
        self._first_tokens: Counter[int] = Counter()

    def noted(self, incident: Incident) -> None:
        """Replays and failures are counted by the journal."""

    def refused(self, error: str) -> None:
        """Refusals are no part of the history."""

    def ended(self, trace: Trace) -> None:
        if trace.timing is not None and trace.completion_tokens:
            self._first_tokens[bisect_left(_FIRST_TOKEN_SECONDS, trace.timing.first_token_s)] += 1

    def add(self, reading: Reading) -> None:
        """Make a point of what has changed since the last reading."""
        last, self._last = self._last, reading
        if last is None:
            return
        first_tokens, self._first_tokens = self._first_tokens, Counter()
        gaps = (now - before for before, now in zip(last.gaps, reading.gaps, strict=True))
        point = Point(
            at_s=reading.at_s,
            seconds=reading.at_s - last.at_s,
            generated_tokens=_increase(last.generated_tokens, reading.generated_tokens),
            computed_tokens=_increase(last.computed_tokens, reading.computed_tokens),
            replays=reading.replays - last.replays,
            failed=reading.failed - last.failed,
            waiting=reading.waiting,
            running=reading.running,
            kv_used=reading.kv_used,
            first_tokens=first_tokens,
            gaps=Counter({bucket: count for bucket, count in enumerate(gaps) if count}),
        )
        for level in self._levels:
            level.add(point)

    def points(self, span_s: float) -> list[Point]:
        """The points of the last `span_s` seconds, oldest first, as fine as they are kept that long."""
        level = next((level for level in self._levels if level.span_s >= span_s), self._levels[-1])
        points = level.points()
        return [point for point in points if point.at_s > points[-1].at_s - span_s]

    async def run(self, read: Callable[[], Reading]) -> None:
        """Take a reading every STEP_S seconds."""
        while True:
            self.add(read())
            await asyncio.sleep(STEP_S)


def _increase(before: Mapping[str, int], now: Mapping[str, int]) -> int:
    """Sum over workers that were known before: a new worker's count is not of this time."""
    return sum(max(0, count - before[worker]) for worker, count in now.items() if worker in before)


def take_reading(at_s: float, models: Sequence[ModelRouter], journal: Journal, gaps: FastHistogram) -> Reading:
    """Read the counters of a router."""
    views = [view for model in models for view in model.mesh.views() if not view.state.is_gone]
    decode = [view for view in views if view.info.role is WorkerRole.DECODE]
    num_blocks = sum(view.info.num_blocks for view in decode)
    num_free = sum(view.load.free_blocks for view in decode)
    num_waiting = sum(model.queue.num_queued_choices for model in models)
    return Reading(
        at_s=at_s,
        generated_tokens={view.info.incarnation: view.load.generated_tokens for view in decode},
        computed_tokens={view.info.incarnation: view.load.computed_tokens for view in views},
        gaps=gaps.counts,
        replays=journal.num_replays,
        failed=journal.num_failed,
        waiting=num_waiting,
        running=max(0, sum(model.limiter.num_held for model in models) - num_waiting),
        kv_used=1 - num_free / num_blocks if num_blocks else None,
    )
