"""Splits the time of requests into phases. Pure.

The phases are those of `tandem.Timing`, as reported by the router, and `client`: the rest of the time that the client
measured, spent before the router received the request and after its last token (connection, gRPC, client code).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import tandem
from tandem_cli.load_test.load import percentile

CLIENT = "client"
PERCENTS = (50, 90, 99)
MARKS = {
    CLIENT: ".",
    "prepare": "o",
    "queue": "q",
    "dispatch": "d",
    "prefill": "P",
    "transfer": "t",
    "wait": "w",
    "decode": "D",
    "backoff": "b",
}
"""All phases in order, with the letter that stands for a phase in a bar."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request with an answer. `total_ms` was measured by the client."""

    request_id: str
    total_ms: float
    timing: tandem.Timing

    @property
    def phases_ms(self) -> dict[str, float]:
        """Milliseconds of each phase, in order. They add up to the total."""
        client_ms = max(0.0, self.total_ms - self.timing.total_ms)
        return {CLIENT: client_ms, **self.timing.phases_ms}


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """One phase over many requests: percentiles in the order of PERCENTS, and its share of the total time."""

    name: str
    percentiles_ms: tuple[float, ...]
    share: float


def summarise(requests: Sequence[TimedRequest]) -> list[PhaseFigures]:
    """One row per phase, and a row `total` for complete requests."""
    columns = {name: [request.phases_ms[name] for request in requests] for name in MARKS}
    columns["total"] = [sum(request.phases_ms.values()) for request in requests]
    total_ms = sum(columns["total"]) or 1.0
    return [
        PhaseFigures(name, tuple(percentile(values, percent) for percent in PERCENTS), sum(values) / total_ms)
        for name, values in columns.items()
    ]


def median_request(requests: Sequence[TimedRequest]) -> TimedRequest:
    """The request with the median time."""
    ordered = sorted(requests, key=lambda request: request.total_ms)
    return ordered[len(ordered) // 2]


def steps_of(request: TimedRequest) -> list[tuple[str, float]]:
    """Phases of a request with their milliseconds, attempt by attempt. Phases of zero length are omitted."""
    steps = [(CLIENT, request.phases_ms[CLIENT]), ("prepare", request.timing.prepare_ms)]
    for attempt in request.timing.attempts:
        steps += [(name, getattr(attempt, f"{name}_ms")) for name in tandem.models.ATTEMPT_PHASES]
    return [(name, length_ms) for name, length_ms in steps if length_ms > 0]


def bar(request: TimedRequest, width: int) -> list[tuple[str, int]]:
    """A request as a bar of `width` characters: phases in order, each with its number of characters.

    Boundaries are rounded independently, so that errors do not add up. Phases shorter than half a character may vanish.
    """
    steps = steps_of(request)
    scale = width / (sum(length_ms for _, length_ms in steps) or 1.0)
    cells: list[tuple[str, int]] = []
    at_ms, drawn = 0.0, 0
    for name, length_ms in steps:
        at_ms += length_ms
        stop = round(at_ms * scale)
        cells.append((name, stop - drawn))
        drawn = stop
    return [(name, count) for name, count in cells if count]
