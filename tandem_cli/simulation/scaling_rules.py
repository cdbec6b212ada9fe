"""The scaling rules of deploy/kubernetes: how many workers of each role, from samples of a mesh. Pure.

    sample ─▶ workers wanted, by each trigger ─▶ the largest, as the HorizontalPodAutoscaler bounds it

The triggers are the queries of `deploy/kubernetes/components/autoscaling`. The bounds are those of the
HorizontalPodAutoscaler: within a tenth of what there is, nothing changes; scaling out at most doubles in a minute, but
reaches the fewest workers at once; scaling in takes the largest wish of the last ten minutes, and one worker each two
minutes.
"""

from collections import deque
from dataclasses import dataclass, field
from math import ceil

from mesh.domain.worker import WorkerRole
from tandem_cli.simulation.observed import Sample

TTFT_TARGET_S = 2.0
MAX_BUSY = MAX_KV = MAX_SLOTS = 0.8
TOKEN_WINDOW_S, BUSY_WINDOW_S, WAIT_WINDOW_S = 600.0, 120.0, 60.0
SCALE_OUT_S, SCALE_OUT_SHARE = 60.0, 1.0
STABILISE_S, SCALE_IN_S = 600.0, 120.0
PERIOD_S = 15.0  # between decisions, as the HorizontalPodAutoscaler's
_TOLERANCE = 0.1  # likewise


@dataclass(frozen=True, slots=True)
class ScaleLimits:
    """The fewest and the most workers of each role, the seconds from the wish for a worker until it registers, and the
    seconds that a worker may drain."""

    min_workers: int = 2
    max_workers: int = 8
    start_s: float = 60.0
    drain_s: float = 60.0


class Triggers:
    """The wishes of the triggers, in workers. Samples of the last ten minutes are kept."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def wanted(self, sample: Sample) -> dict[WorkerRole, list[float]]:
        """Workers' worth of work by each trigger, over its threshold."""
        self._samples.append(sample)
        while len(self._samples) > 1 and self._samples[1].at_s <= sample.at_s - TOKEN_WINDOW_S:
            self._samples.popleft()
        return {WorkerRole.PREFILL: self._prefill(sample), WorkerRole.DECODE: self._decode(sample)}

    def _prefill(self, sample: Sample) -> list[float]:
        """Prompts that take as long as the target want no workers of their own, nor do a few that meet by chance: the
        mean of a minute counts."""
        busy_s, prompt_tokens = self._grown(sample, TOKEN_WINDOW_S)
        token_s = busy_s / max(prompt_tokens, TOKEN_WINDOW_S)  # at least a token per second, as the query says
        recent = [old.roles[WorkerRole.PREFILL] for old in self._samples if old.at_s > sample.at_s - WAIT_WINDOW_S]
        waiting = sum(load.waiting_tokens + load.pending_tokens for load in recent) / len(recent)
        recent_s, _ = self._grown(sample, BUSY_WINDOW_S)
        return [waiting * token_s / TTFT_TARGET_S, recent_s / BUSY_WINDOW_S / MAX_BUSY]

    def _decode(self, sample: Sample) -> list[float]:
        now = sample.roles[WorkerRole.DECODE]
        return [now.kv / MAX_KV, now.slots / MAX_SLOTS, now.num_workers + 1 if now.waiting_tokens else 0]

    def _grown(self, sample: Sample, window_s: float) -> tuple[float, float]:
        """Busy seconds and prompt tokens of prefill workers in the last `window_s`, as Prometheus' increase: scaled up
        while fewer seconds are known."""
        since = next(old for old in self._samples if old.at_s >= sample.at_s - window_s)
        known_s = sample.at_s - since.at_s
        if not known_s:
            return 0.0, 0.0
        first, last = since.roles[WorkerRole.PREFILL], sample.roles[WorkerRole.PREFILL]
        scale = window_s / known_s
        return scale * (last.busy_s - first.busy_s), scale * (last.prompt_tokens - first.prompt_tokens)


@dataclass(slots=True)
class Replicas:
    """The HorizontalPodAutoscaler's number of one role's workers. Times are in seconds, ascending."""

    limits: ScaleLimits
    count: int
    _wishes: deque[tuple[float, int]] = field(default_factory=deque)
    _changes: deque[tuple[float, int]] = field(default_factory=deque)

    def decide(self, at_s: float, wanted: list[float]) -> int:
        """Return the new number of workers, from what the triggers want now."""
        if not self._wishes:
            self._wishes.append((at_s, self.count))
        wish = max(self._one_wish(value) for value in wanted)
        wish = min(max(wish, self.limits.min_workers), self.limits.max_workers)
        self._wishes.append((at_s, wish))
        while self._wishes[0][0] <= at_s - STABILISE_S:
            self._wishes.popleft()
        while self._changes and self._changes[0][0] <= at_s - max(SCALE_OUT_S, SCALE_IN_S):
            self._changes.popleft()
        before = self.count
        if wish > self.count:
            started = sum(change for when_s, change in self._changes if change > 0 and when_s > at_s - SCALE_OUT_S)
            doubled = ceil((self.count - started) * (1 + SCALE_OUT_SHARE))
            self.count = max(self.count, min(wish, max(doubled, self.limits.min_workers)))
        else:
            ended = any(change < 0 and when_s > at_s - SCALE_IN_S for when_s, change in self._changes)
            if max(past for _, past in self._wishes) < self.count and not ended:
                self.count -= 1
        if self.count != before:
            self._changes.append((at_s, self.count - before))
        return self.count

    def _one_wish(self, wanted: float) -> int:
        is_near = self.count > 0 and abs(wanted / self.count - 1) <= _TOLERANCE
        return self.count if is_near else ceil(wanted)
