"""Where requests' time goes: what a client saw, beside the phases that the router reports. No I/O.

The phases are those of `tandem.Timing`, with one more that only the client can know: `client`, the time of a request
that is not between the router's first sight of it and its last token (connection, gRPC, the client itself).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import tandem
from bench.load import percentile

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
"""All phases in order, with the letter of each in a bar."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request. `total_ms` is the client's own figure."""

    request_id: str
    total_ms: float
    timing: tandem.Timing

    @property
    def phases_ms(self) -> dict[str, float]:
        """All phases in order; they add up to the total."""
        client_ms = max(0.0, self.total_ms - self.timing.total_ms)
        return {CLIENT: client_ms, **self.timing.phases_ms}


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """One phase of many requests: percentiles in the order of PERCENTS, and the share of all their time."""

    name: str
    percentiles_ms: tuple[float, ...]
    share: float


def summarise(samples: Sequence[Sample]) -> list[PhaseFigures]:
    """A row for each phase, and one for the whole request."""
    columns = {name: [sample.phases_ms[name] for sample in samples] for name in MARKS}
    columns["total"] = [sum(sample.phases_ms.values()) for sample in samples]
    whole = sum(columns["total"]) or 1.0
    return [
        PhaseFigures(name, tuple(percentile(values, percent) for percent in PERCENTS), sum(values) / whole)
        for name, values in columns.items()
    ]


def median_sample(samples: Sequence[Sample]) -> Sample:
    """The request with the median time."""
    ordered = sorted(samples, key=lambda sample: sample.total_ms)
    return ordered[len(ordered) // 2]


def steps_of(sample: Sample) -> list[tuple[str, float]]:
    """Phases with their milliseconds in the order they came, attempt after attempt; those of no length left out."""
    steps = [(CLIENT, sample.phases_ms[CLIENT]), ("prepare", sample.timing.prepare_ms)]
    for attempt in sample.timing.attempts:
        steps += [(name, getattr(attempt, f"{name}_ms")) for name in tandem.models.ATTEMPT_PHASES]
    return [(name, length_ms) for name, length_ms in steps if length_ms > 0]


def bar(sample: Sample, width: int) -> list[tuple[str, int]]:
    """The request as a bar: phases in order, each with its number of characters; all together `width`.

    Each boundary is rounded by itself, so that errors do not add up; a phase shorter than half a character is not seen.
    """
    steps = steps_of(sample)
    scale = width / (sum(length_ms for _, length_ms in steps) or 1.0)
    cells: list[tuple[str, int]] = []
    at_ms, drawn = 0.0, 0
    for name, length_ms in steps:
        at_ms += length_ms
        end = round(at_ms * scale)
        cells.append((name, end - drawn))
        drawn = end
    return [(name, count) for name, count in cells if count]
