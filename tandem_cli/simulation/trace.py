"""Traces: when requests arrive, and how long their prompts and answers are. Read from a file, or drawn at random.

Files are those that `tandem bench --trace` replays: JSON lines with `arrival_s`, `input_tokens` and `max_tokens`, or
with the names in the traces that Mooncake publishes.
"""

import json
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mesh.domain.errors import ConfigurationError
from tandem_cli.load_test.jobs import read_shapes

DAY_S = 86400.0
_PEAK_AT_S = 15 * 3600.0
_PROMPTS_PEAK_AT_S = 9 * 3600.0
_SWING = 0.6  # the day's peak is 1.6 times its mean, its low 0.4 times


class Arrival(NamedTuple):
    """A request: when it arrives, in seconds from the first one's arrival, and its lengths."""

    at_s: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class LengthMix:
    """Lengths to draw: their means, and the spread of their logarithms around it (log-normal). Without a spread all are
    equal. No request is longer than `max_total_tokens`. The mean of prompts swings between `shift` times itself, at the
    peak, and that part of it, and the mean of answers the other way."""

    input_tokens: int
    output_tokens: int
    spread: float = 0.0
    max_total_tokens: int = 1 << 20
    shift: float = 1.0

    def draw(self, rng: random.Random, phase: float = 1.0) -> tuple[int, int]:
        """Lengths of one request. `phase` is 1 at the peak of prompts, -1 at that of answers."""
        factor = self.shift**phase
        num_input = min(self._draw(self.input_tokens * factor, rng), self.max_total_tokens - 1)
        return num_input, min(self._draw(self.output_tokens / factor, rng), self.max_total_tokens - num_input)

    def _draw(self, mean: float, rng: random.Random) -> int:
        if not self.spread:
            return max(1, round(mean))
        return max(1, round(rng.lognormvariate(math.log(mean) - self.spread**2 / 2, self.spread)))


def steady(rate: float, duration_s: float, mix: LengthMix, seed: int) -> list[Arrival]:
    """Poisson arrivals at one rate, in requests per second. Prompts have their peak at the beginning and at the end."""
    return _poisson(rate, duration_s, mix, seed, lambda _: 1.0, lambda at_s: _cosine(at_s / duration_s))


def day(mean_rate: float, mix: LengthMix, seed: int) -> list[Arrival]:
    """Poisson arrivals over a day, whose rate follows a cosine: highest at 15:00, lowest at 3:00. Prompts have their
    peak at 9:00."""

    def share_at(at_s: float) -> float:
        return (1 + _SWING * _cosine((at_s - _PEAK_AT_S) / DAY_S)) / (1 + _SWING)

    def phase_at(at_s: float) -> float:
        return _cosine((at_s - _PROMPTS_PEAK_AT_S) / DAY_S)

    return _poisson(mean_rate * (1 + _SWING), DAY_S, mix, seed, share_at, phase_at)


def _cosine(turns: float) -> float:
    return math.cos(2 * math.pi * turns)


def _poisson(
    rate: float,
    duration_s: float,
    mix: LengthMix,
    seed: int,
    share_at: Callable[[float], float],
    phase_at: Callable[[float], float],
) -> list[Arrival]:
    """Draw arrivals at the highest rate, and keep each with the probability `share_at` its time (Lewis and Shedler
    1979).
    """
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    at_s = rng.expovariate(rate)
    while at_s < duration_s:
        if rng.random() < share_at(at_s):
            arrivals.append(Arrival(at_s, *mix.draw(rng, phase_at(at_s))))
        at_s += rng.expovariate(rate)
    if not arrivals:
        raise ConfigurationError(f"no request arrives in {duration_s:g} s at {rate:g} requests/s")
    return arrivals


def read(path: Path) -> list[Arrival]:
    """Arrivals in order; times count from the first. Raises ConfigurationError with the number of the bad line."""
    shapes = sorted(read_shapes(path))
    return [Arrival(at_s - shapes[0][0], num_input, num_output) for at_s, num_input, num_output in shapes]


def write(path: Path, arrivals: Iterable[Arrival]) -> None:
    """Write a trace that `read` and `tandem bench --trace` take."""
    lines = (
        json.dumps({"arrival_s": round(at_s, 6), "input_tokens": num_input, "max_tokens": num_output})
        for at_s, num_input, num_output in arrivals
    )
    path.write_text("\n".join(lines) + "\n")
