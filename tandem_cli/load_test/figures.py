"""Computes figures from records. Pure. docs/benchmarking.md defines every name that `figures` returns."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem_cli.load_test.records import Outcome, Record, Run

PERCENTS = (50, 90, 99)
BLENDED_RATIO = 3.0
_RATIO_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objective: targets for a good answer, and the share of answers that must be good."""

    ttft_ms: float = 2000.0
    tpot_ms: float = 60.0
    share: float = 0.9

    def is_met(self, record: Record) -> bool:
        """Whether the answer is complete and meets both targets. An answer of one token always meets the TPOT
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
        """From at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile, with linear interpolation between neighbours; 0 for no values."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[round(percent) - 1]


def figures(run: Run, slo: Slo) -> dict[str, float]:
    """All figures of one run, by name. Figures that were not observed are absent, such as TTFT without streaming."""
    done = run.of(Outcome.OK)
    result = _counts(run)
    if run.duration_s > 0:
        result["requests_per_s"] = len(done) / run.duration_s
        result["output_tokens_per_s"] = sum(record.num_tokens for record in done) / run.duration_s
        result["input_tokens_per_s"] = sum(record.input_tokens for record in done) / run.duration_s
        result["generator_cpu"] = run.generator_cpu_s / run.duration_s
    for name, values in _times(done).items():
        if values:
            result |= {f"{name}_p{percent}_ms": 1000 * percentile(values, percent) for percent in PERCENTS}
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


def _times(done: Sequence[Record]) -> Mapping[str, list[float]]:
    return {
        "ttft": [record.ttft_s for record in done if record.ttft_s is not None],
        "tpot": [record.tpot_s for record in done if record.tpot_s is not None],
        "gap": [gap for record in done for gap in record.gaps_s],
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
