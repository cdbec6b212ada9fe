"""The events that clients have seen, compared with those that they should have seen.

A `History` is one request's events with their times. `faults_of` holds it against the undisturbed answer:

    a choice ends once, and nothing of it follows          a stream that ends well is the undisturbed answer, whole
    log-probs are within 1e-4, text and usage are equal    one that does not is a beginning of it
    nothing ends later than its deadline and a second

`judge` looks at errors: each must be of a kind that a disturbance of its time allows, and a disturbance has a budget.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import tandem

LATE_S = 1.0
TOLERANCE = 1e-4
FINISHED, CANCELLED = "finished", "cancelled"
# A client's own clock ends a call a moment before or after its deadline.
_CLOCK_S = 0.1


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A fault while it lasted, recovery included. `router` is the only one concerned, or "" for all.

    Errors of the kinds in `allowed` are excused, up to `budget` of them (None: any number).
    """

    name: str
    began_s: float
    ended_s: float
    allowed: frozenset[str] = frozenset()
    budget: int | None = 0
    router: str = ""

    def meets(self, history: "History") -> bool:
        """True if the stream was there during the disturbance."""
        is_concerned = self.router in ("", history.router)
        return is_concerned and history.started_s <= self.ended_s and history.ended_s >= self.began_s


@dataclass(slots=True)
class History:
    """One request as its client saw it. `ending` is "finished", "cancelled" or the name of the error."""

    name: str
    router: str
    started_s: float
    deadline_s: float
    has_own_deadline: bool = False
    request_id: str = ""
    ended_s: float = 0.0
    ending: str = ""
    error: str = ""
    token_times_s: "array[float]" = field(default_factory=lambda: array("d"))
    faults: list[str] = field(default_factory=list)

    @property
    def is_late(self) -> bool:
        """True if it ended after its deadline and a second."""
        return self.ended_s > self.deadline_s + LATE_S

    @property
    def is_out_of_time(self) -> bool:
        """True if it ended because its own, short deadline had come."""
        at_deadline = self.ended_s >= self.deadline_s - _CLOCK_S
        return self.has_own_deadline and self.ending == "DeadlineExceeded" and at_deadline

    @property
    def has_failed(self) -> bool:
        """True if it ended with an error that its client has not brought about."""
        return self.ending not in (FINISHED, CANCELLED) and not self.is_out_of_time

    @property
    def largest_gap_s(self) -> float:
        """Longest wait between two tokens; 0 without two."""
        return max((later - earlier for earlier, later in pairwise(self.token_times_s)), default=0.0)


def faults_of(history: History, events: Sequence[tandem.TokenEvent], expected: tandem.Result) -> list[str]:
    """Describe everything that is wrong with the events of one stream; empty if nothing is."""
    faults = []
    by_choice: defaultdict[int, list[tandem.TokenEvent]] = defaultdict(list)
    for event in events:
        by_choice[event.index].append(event)
    for choice in expected.choices:
        mine = by_choice.pop(choice.index, [])
        faults += _ending_faults(mine, choice, is_complete=history.ending == FINISHED)
        faults += _token_faults(mine, choice)
    if by_choice:
        faults.append(f"choices {sorted(by_choice)} were not asked for")
    return [f"{history.name} at {history.router}: {fault}" for fault in faults]


def _ending_faults(events: list[tandem.TokenEvent], choice: tandem.Choice, *, is_complete: bool) -> list[str]:
    endings = [event.finish_reason for event in events if event.finish_reason is not None]
    if len(endings) > 1:
        return [f"ended {len(endings)} times"]
    if not endings:
        return ["ended well without a terminal event"] if is_complete else []
    found = []
    last = events[-1]
    if last.finish_reason is None:
        found.append("something followed the terminal event")
    if endings != [choice.finish_reason]:
        found.append(f"ended with {endings[0]}, not {choice.finish_reason}")
    if "".join(event.text for event in events) != choice.text:
        found.append("the text differs")
    if last.usage is None or last.usage.completion_tokens != choice.usage.completion_tokens:
        found.append(f"usage {last.usage}, not {choice.usage}")
    return found


def is_about_ending(fault: str) -> bool:
    """True for one of `faults_of` that concerns how a stream ended, and not what was in it."""
    return "ended" in fault or "terminal" in fault


def _token_faults(events: list[tandem.TokenEvent], choice: tandem.Choice) -> list[str]:
    """Every token in its place: that a gap, a duplicate or a wrong token is none of."""
    tokens = [event.token for event in events if event.token is not None]
    has_ended = any(event.finish_reason is not None for event in events)
    expected = choice.tokens if has_ended else choice.tokens[: len(tokens)]
    if [token.id for token in tokens] != [token.id for token in expected]:
        at = next((n for n, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a.id != b.id), len(expected))
        return [f"tokens differ from index {at} on ({len(tokens)} of {len(choice.tokens)} came)"]
    for index, (ours, theirs) in enumerate(zip(tokens, expected, strict=True)):
        if abs((ours.logprob or 0.0) - (theirs.logprob or 0.0)) > TOLERANCE:
            return [f"the log-prob at index {index} is {ours.logprob}, not {theirs.logprob}"]
    return []


@dataclass(frozen=True, slots=True)
class Verdict:
    """Errors that no fault excuses, and the number of excused ones by disturbance and kind."""

    unexcused: list[str]
    excused: Counter[tuple[str, str]]


def judge(histories: Iterable[History], disturbances: Sequence[Disturbance]) -> Verdict:
    """Hold all errors against what the disturbances of their time allow."""
    unexcused, excused, used = list[str](), Counter[tuple[str, str]](), Counter[Disturbance]()
    for history in histories:
        if not history.has_failed:
            continue
        excuse = next(
            (
                disturbance
                for disturbance in disturbances
                if disturbance.meets(history)
                and history.ending in disturbance.allowed
                and (disturbance.budget is None or used[disturbance] < disturbance.budget)
            ),
            None,
        )
        if excuse is None:
            meanwhile = [disturbance.name for disturbance in disturbances if disturbance.meets(history)]
            unexcused.append(f"{history.name} at {history.router}: {history.ending}: {history.error} ({meanwhile})")
        else:
            used[excuse] += 1
            excused[excuse.name, history.ending] += 1
    return Verdict(unexcused, excused)


def failed_in(disturbance: Disturbance, histories: Iterable[History], others: Sequence[Disturbance]) -> list[History]:
    """Requests that met the disturbance and failed, without those that outlasted it and failed in one of
    `others`, which excuses them.
    """
    met = (history for history in histories if history.has_failed and disturbance.meets(history))
    return [history for history in met if judge([history], others).unexcused]


def percentile(values: Iterable[float], percent: float) -> float:
    """Nearest rank; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0
