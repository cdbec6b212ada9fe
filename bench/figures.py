"""Records to figures. Pure; docs/benchmarking.md defines every name that `figures` returns."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.records import Outcome, Record, Run

PERCENTS = (50, 90, 99)
BLENDED_RATIO = 3.0
_RATIO_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class Slo:
    """What counts as a good answer, and the share of answers that must be good."""

    ttft_ms: float = 2000.0
    tpot_ms: float = 60.0
    share: float = 0.9

    def is_met(self, record: Record) -> bool:
        """Complete, and both targets kept. An answer of one token has no time per token to miss."""
        if record.outcome is not Outcome.OK or record.ttft_s is None:
            return False
        return 1000 * record.ttft_s <= self.ttft_ms and 1000 * (record.tpot_s or 0.0) <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class Median:
    """One figure over several runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Median":
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, linear between neighbours; 0 of nothing."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[round(percent) - 1]


def figures(run: Run, slo: Slo) -> dict[str, float]:
    """All figures of one run by name. What was not observed, such as TTFT of whole answers, is absent."""
    done = run.of(Outcome.OK)
    found = _counts(run)
    if run.duration_s > 0:
        found["requests_per_s"] = len(done) / run.duration_s
        found["output_tokens_per_s"] = sum(record.num_tokens for record in done) / run.duration_s
        found["input_tokens_per_s"] = sum(record.input_tokens for record in done) / run.duration_s
        found["generator_cpu"] = run.generator_cpu_s / run.duration_s
    for name, values in _times(done).items():
        if values:
            found |= {f"{name}_p{percent}_ms": 1000 * percentile(values, percent) for percent in PERCENTS}
    if run.is_streamed and run.records:
        num_good = sum(map(slo.is_met, run.records))
        found["slo_share"] = num_good / len(run.records)
        if run.duration_s > 0:
            found["good_requests_per_s"] = num_good / run.duration_s
    return found


def _counts(run: Run) -> dict[str, float]:
    return {
        "num_ok": len(run.of(Outcome.OK)),
        "num_refused": len(run.of(Outcome.REFUSED)),
        "num_errors": len(run.of(Outcome.ERROR)),
        "num_short": sum(record.num_tokens < record.asked_tokens for record in run.of(Outcome.OK)),
    }


def _times(done: Sequence[Record]) -> Mapping[str, list[float]]:
    return {
        "ttft": [record.ttft_s for record in done if record.ttft_s is not None],
        "tpot": [record.tpot_s for record in done if record.tpot_s is not None],
        "gap": [gap for record in done for gap in record.gaps_s],
        "latency": [record.latency_s for record in done],
    }


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, Median]:
    """Each figure over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: Median.of([run[name] for run in runs if name in run]) for name in names}


def goodput(points: Sequence[tuple[float, float]], share: float) -> float | None:
    """The highest rate at which at least `share` of the requests were good, of points (rate, share). None: at none."""
    return max((rate for rate, good in points if good >= share), default=None)


def knee(points: Sequence[tuple[float, float]]) -> int | None:
    """Which of the (throughput, latency) points, in order of load, is the knee.

    The rule is Kleinrock's "power" (1979): the knee is where throughput / latency is largest. Up to it throughput grows
    faster than latency, after it latency grows faster. None for fewer than three points, and if the last point is the
    best, because then the curve has not bent within the range measured.
    """
    if len(points) < 3:
        return None
    power = [throughput / latency if latency > 0 else 0.0 for throughput, latency in points]
    best = max(range(len(points)), key=power.__getitem__)
    return best if best < len(points) - 1 else None


def price_per_million(price_per_hour: float, tokens_per_s: float) -> float | None:
    """$ for a million tokens: price / (3600 x tokens/s) x 1e6. None if no tokens came."""
    return price_per_hour / (3600 * tokens_per_s) * 1e6 if tokens_per_s > 0 else None


def blended_price_per_million(
    price_per_hour: float, input_tokens_per_s: float, output_tokens_per_s: float
) -> float | None:
    """$ for a million tokens, in and out alike, of a load with three input tokens to one output token.

    It is measured, not derived: None for a load with another ratio, whose hour cannot be split fairly between the two.
    """
    if abs(input_tokens_per_s - BLENDED_RATIO * output_tokens_per_s) > _RATIO_TOLERANCE * input_tokens_per_s:
        return None
    return price_per_million(price_per_hour, input_tokens_per_s + output_tokens_per_s)
