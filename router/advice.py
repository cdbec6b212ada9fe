"""Advice on the number of workers: one more or one less of a role, from this router's figures of the last minutes.

    a sample each second ─┬─▶ the last minute: a role is short of workers ──────▶ add one
                          └─▶ the last five minutes: the others would suffice ──▶ remove one

Only samples since the number of a role's workers last changed count for it: earlier ones tell nothing about the
workers that are there now. Advice that stands is withdrawn at a lower level than the one at which it was given, so that
it does not come and go. Pure but for `Adviser.run`.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

from mesh.domain.worker import WorkerRole

DEFAULT_TTFT_TARGET_S = 2.0
STEP_S = 1.0
_ADD_WINDOW_S, _REMOVE_WINDOW_S = 60.0, 300.0
_FORMED_EACH = 5  # samples
_FIRST_AFTER_S = 30.0  # no advice on workers that have not been there for this long
# Levels at which advice is given, and at which it is withdrawn.
_SHORT_S = (20.0, 5.0)
_FULL = (0.85, 0.75)
_BUSY = (0.8, 0.7)
_LATE = (1.0, 0.7)
_SPARE = (0.5, 0.6)


class Action(Enum):
    ADD = "add"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """Workers of a role that get requests, at one moment. `used`: of prefill workers the share that has prompts, of
    decode workers the share of slots or of KV blocks in use, whichever is larger. `is_short`: the first request in the
    queue waits for this role.
    """

    num_workers: int
    used: float
    is_short: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment. `prompt_tokens`: of prompts that wait for prefill workers or are with them; `computed_tokens`: of
    those that prefill workers have computed so far.
    """

    at_s: float
    prefill: RoleLoad
    decode: RoleLoad
    prompt_tokens: int = 0
    computed_tokens: int = 0

    def of(self, role: WorkerRole) -> RoleLoad:
        """The load of a role."""
        return self.prefill if role is WorkerRole.PREFILL else self.decode


@dataclass(frozen=True, slots=True)
class Advice:
    """One worker more or less of a role. `reason` is a clause for operators."""

    action: Action
    role: WorkerRole
    reason: str


def advise(samples: Sequence[Sample], ttft_target_s: float, standing: Sequence[Advice] = ()) -> list[Advice]:
    """Return what would help now, at most one advice for each role; nothing if all is well.

    `samples` are in their order, `standing` is the advice given so far. Roles without workers are none of its business.
    """
    advice_now = []
    for role in WorkerRole:
        since = _since_last_change(samples, role)
        if not since or not since[-1].of(role).num_workers or _span_s(since) < _FIRST_AFTER_S:
            continue
        actions = {advice.action for advice in standing if advice.role is role}
        advice = _add(since, role, ttft_target_s, is_given=Action.ADD in actions)
        advice = advice or _remove(since, role, is_given=Action.REMOVE in actions)
        if advice is not None:
            advice_now.append(advice)
    return advice_now


def _add(samples: Sequence[Sample], role: WorkerRole, ttft_target_s: float, *, is_given: bool) -> Advice | None:
    recent = _last(samples, _ADD_WINDOW_S)
    reason = ""
    used = _mean_used(recent, role)
    short_s = _span_s(recent) * sum(sample.of(role).is_short for sample in recent) / len(recent)
    if short_s >= _SHORT_S[is_given]:
        lacks = "prompts" if role is WorkerRole.PREFILL else "requests"
        reason = f"{lacks} waited for one for {short_s:.0f} s of the last {_span_s(recent):.0f}"
    elif role is WorkerRole.DECODE and used >= _FULL[is_given]:
        reason = f"{used:.0%} of their KV or slots are in use"
    elif role is WorkerRole.PREFILL and used >= _BUSY[is_given]:
        first_token_s = _prompt_s(recent)
        if first_token_s is not None and first_token_s > _LATE[is_given] * ttft_target_s:
            reason = (
                f"prompts take {first_token_s:.1f} s where the target is {ttft_target_s:g}, and {used:.0%} are busy"
            )
    return Advice(Action.ADD, role, reason) if reason else None


def _remove(samples: Sequence[Sample], role: WorkerRole, *, is_given: bool) -> Advice | None:
    """One less would do, if the busiest minute leaves the others spare time."""
    recent, count = _last(samples, _REMOVE_WINDOW_S), samples[-1].of(role).num_workers
    if count < 2 or _span_s(recent) < 0.95 * _REMOVE_WINDOW_S or any(sample.of(role).is_short for sample in recent):
        return None
    minutes: dict[int, list[Sample]] = {}
    for sample in recent:
        minutes.setdefault(int((recent[-1].at_s - sample.at_s) // 60), []).append(sample)
    used = max(_mean_used(minute, role) for minute in minutes.values())
    if used * count / (count - 1) > _SPARE[is_given]:
        return None
    return Advice(Action.REMOVE, role, f"they are used {used:.0%} in the busiest of the last five minutes")


def _since_last_change(samples: Sequence[Sample], role: WorkerRole) -> list[Sample]:
    """The last samples, all of which have the same number of workers of the role."""
    count = samples[-1].of(role).num_workers if samples else 0
    return list(takewhile(lambda sample: sample.of(role).num_workers == count, reversed(samples)))[::-1]


def _last(samples: Sequence[Sample], seconds: float) -> list[Sample]:
    return [sample for sample in samples if sample.at_s > samples[-1].at_s - seconds]


def _span_s(samples: Sequence[Sample]) -> float:
    return samples[-1].at_s - samples[0].at_s


def _mean_used(samples: Sequence[Sample], role: WorkerRole) -> float:
    return sum(sample.of(role).used for sample in samples) / len(samples)


def _prompt_s(samples: Sequence[Sample]) -> float | None:
    """Mean seconds, weighed by tokens, from a prompt's arrival in the queue until it is computed (Little's law); None
    without a prompt."""
    num_computed = samples[-1].computed_tokens - samples[0].computed_tokens
    if not num_computed:
        return None
    mean_tokens = sum(sample.prompt_tokens for sample in samples) / len(samples)
    return mean_tokens * _span_s(samples) / num_computed


class Adviser:
    """The advice for one model. `take` returns a sample of now."""

    def __init__(self, take: Callable[[], Sample], *, ttft_target_s: float) -> None:
        self.advice: list[Advice] = []
        """What would help now."""
        self._take = take
        self._ttft_target_s = ttft_target_s
        self._samples: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)
        while self._samples[0].at_s < sample.at_s - _REMOVE_WINDOW_S:
            self._samples.popleft()

    def used(self, role: WorkerRole) -> float:
        """The mean use of the role's workers (RoleLoad) over the last minute; 0.0 without samples."""
        recent = _last(list(self._samples), _ADD_WINDOW_S) if self._samples else []
        return _mean_used(recent, role) if recent else 0.0

    def form(self) -> None:
        """Form the advice anew from the samples so far."""
        self.advice = advise(list(self._samples), self._ttft_target_s, self.advice)

    async def run(self) -> None:
        """Take a sample each second, and form the advice from time to time, until cancelled."""
        while True:
            for _ in range(_FORMED_EACH):
                self.add(self._take())
                await asyncio.sleep(STEP_S)
            self.form()
