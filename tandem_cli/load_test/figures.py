"""Records of requests, and the figures of a run that are computed from them. docs/benchmarking.md defines every name
that `figures` returns.

A burst has figures of its own: gaps of the steady streams before it and during its prefill.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import TypeAlias

PERCENTS = (50, 90, 99)
BLENDED_RATIO = 3.0
"""Input tokens for each output token in a blended price."""
_RATIO_TOLERANCE = 0.01
STEADY, BURST = "steady", "burst"
BEGUN, ARRIVED, OVER = "streams_begun", "burst_arrived", "burst_over"


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
        return count_errors(self.records)


def count_errors(records: Iterable[Record]) -> dict[str, int]:
    """The number of requests per error message."""
    return dict(Counter(record.error for record in records if record.error))


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


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objective: targets for a good answer, and the share of answers that must be good."""

    ttft_ms: float = 2000.0
    tpot_ms: float = 60.0
    share: float = 0.9

    def is_met(self, record: Record) -> bool:
        """True if the answer is complete and meets both targets. An answer of one token always meets the TPOT
        target.
        """
        if record.outcome is not Outcome.OK or record.ttft_s is None:
            return False
        return 1000 * record.ttft_s <= self.ttft_ms and 1000 * (record.tpot_s or 0.0) <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class Median:
    """Median and range of one figure over several runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Median":
        """The median and the range of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile, with linear interpolation between neighbours; 0 for no values."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[round(percent) - 1]


def p50_and_p99_ms(values_s: Sequence[float], digits: int = 1) -> str:
    """Both percentiles in milliseconds, for a table."""
    return " / ".join(f"{1000 * percentile(values_s, percent):.{digits}f}" for percent in (50, 99))


def percentiles_ms(name: str, values_s: Sequence[float], percents: Iterable[int] = PERCENTS) -> dict[str, float]:
    """The percentiles of times, as figures: `NAME_p50_ms` and so on."""
    return {f"{name}_p{percent}_ms": 1000 * percentile(values_s, percent) for percent in percents}


def figures(run: Run, slo: Slo) -> dict[str, float]:
    """All figures of one run, by name. Figures that were not observed are absent, such as TTFT without streaming."""
    done = run.of(Outcome.OK)
    result = _counts(run)
    if run.duration_s > 0:
        result["requests_per_s"] = len(done) / run.duration_s
        result["output_tokens_per_s"] = sum(record.num_tokens for record in done) / run.duration_s
        result["input_tokens_per_s"] = sum(record.input_tokens for record in done) / run.duration_s
        result["generator_cpu"] = run.generator_cpu_s / run.duration_s
    times = times_of(done) | {"gap": [gap for record in done for gap in record.gaps_s]}
    for name, values in times.items():
        if values:
            result |= percentiles_ms(name, values)
    if run.is_streamed and run.records:
        num_good = sum(map(slo.is_met, run.records))
        result["slo_share"] = num_good / len(run.records)
        if run.duration_s > 0:
            result["good_requests_per_s"] = num_good / run.duration_s
    return result


def _counts(run: Run) -> dict[str, float]:
    return {
        "num_ok": len(run.of(Outcome.OK)),
        "num_refused": len(run.of(Outcome.REFUSED)),
        "num_errors": len(run.of(Outcome.ERROR)),
        "num_short": sum(record.num_tokens < record.asked_tokens for record in run.of(Outcome.OK)),
    }


def times_of(done: Sequence[Record]) -> dict[str, list[float]]:
    """The times of answers, by the names of their figures: seconds of each that has them."""
    return {
        "ttft": [record.ttft_s for record in done if record.ttft_s is not None],
        "tpot": [record.tpot_s for record in done if record.tpot_s is not None],
        "latency": [record.latency_s for record in done],
    }


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, Median]:
    """Median and range of each figure, over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: Median.of([run[name] for run in runs if name in run]) for name in names}


def goodput(points: Sequence[tuple[float, float]], share: float) -> float | None:
    """The highest rate at which at least `share` of the requests were good. `points` are (rate, share); None if no rate
    qualifies.
    """
    return max((rate for rate, good in points if good >= share), default=None)


def knee(points: Sequence[tuple[float, float]]) -> int | None:
    """The index of the knee among (throughput, latency) points in order of load.

    The rule is Kleinrock's "power" (1979): throughput / latency is largest at the knee. Below it throughput grows
    faster than latency, above it latency grows faster. None for fewer than three points, and if the last point has the
    highest power, because then the curve does not bend within the measured range.
    """
    if len(points) < 3:
        return None
    power = [throughput / latency if latency > 0 else 0.0 for throughput, latency in points]
    best = max(range(len(points)), key=power.__getitem__)
    return best if best < len(points) - 1 else None


def price_per_million(price_per_hour: float, tokens_per_s: float) -> float | None:
    """Dollars per million tokens: price / (3600 x tokens/s) x 1e6. None without tokens."""
    return price_per_hour / (3600 * tokens_per_s) * 1e6 if tokens_per_s > 0 else None


def blended_price_per_million(
    price_per_hour: float, input_tokens_per_s: float, output_tokens_per_s: float
) -> float | None:
    """Dollars per million tokens, input and output alike, for a load with three input tokens per output token.

    None for a load with another ratio: the price is measured, and the cost of such a load cannot be split fairly.
    """
    if abs(input_tokens_per_s - BLENDED_RATIO * output_tokens_per_s) > _RATIO_TOLERANCE * input_tokens_per_s:
        return None
    return price_per_million(price_per_hour, input_tokens_per_s + output_tokens_per_s)


def gaps_over_time(records: Sequence[Record]) -> list[tuple[float, float]]:
    """Gaps between tokens of the steady streams as (end of the gap, length), in seconds, ordered by time."""
    steady = (record for record in records if record.group == STEADY)
    gaps = ((later, later - earlier) for record in steady for earlier, later in pairwise(record.token_s))
    return sorted(gaps)


def disturbed_until_s(run: Run) -> float | None:
    """The time of the last first token in the burst. After it, all requests of the burst only decode. None if no prompt
    of the burst had one.
    """
    first = (record.token_s[0] for record in run.records if record.group == BURST and record.token_s)
    return max(first, default=None)


def burst_figures(run: Run, slo: Slo) -> dict[str, float]:
    """Figures of the requests in the burst, and gaps of the steady streams before the burst and during its prefill.

    Rates are omitted, because a run with idle time at its ends has no meaningful rate.
    """
    burst = replace(run, records=[record for record in run.records if record.group == BURST])
    result = {name: value for name, value in figures(burst, slo).items() if not name.endswith("_per_s")}
    arrived_s, prefill_end_s = run.marks[ARRIVED], disturbed_until_s(run)
    gaps = gaps_over_time(run.records)
    phases = {"before": [gap for at, gap in gaps if run.marks[BEGUN] < at < arrived_s]}
    if prefill_end_s is not None:
        phases["during"] = [gap for at, gap in gaps if at >= arrived_s and at - gap < prefill_end_s]
        result["burst_prefill_ms"] = 1000 * (prefill_end_s - arrived_s)
    for phase, values in phases.items():
        if values:
            result |= percentiles_ms(f"steady_gap_{phase}", values, (50, 99))
            result[f"steady_gap_{phase}_max_ms"] = 1000 * max(values)
    return result
