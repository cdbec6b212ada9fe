"""Figures of a simulation: those of a load test, and what the workers did and cost. docs/simulation.md defines them."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from mesh.domain.worker import WorkerRole
from tandem_cli.load_test.figures import (
    PERCENTS,
    Outcome,
    Record,
    Slo,
    percentiles_ms,
    price_per_million,
    times_of,
)
from tandem_cli.simulation.observed import Observed, Sample

Figures = dict[str, float]
HOUR_S = 3600.0


def figures(observed: Observed, slo: Slo, price_per_hour: float | None = None) -> Figures:
    """All figures of one simulation, by name. Prices are there with a price of a worker's hour only."""
    records, duration_s = observed.records, max(observed.duration_s, 1e-9)
    done = [record for record in records if record.outcome is Outcome.OK]
    result: Figures = {
        "num_requests": len(records),
        "num_ok": len(done),
        "num_refused": sum(record.outcome is Outcome.REFUSED for record in records),
        "num_errors": sum(record.outcome is Outcome.ERROR for record in records),
        "num_replays": observed.num_replays,
        "num_switches": observed.num_switches,
        "duration_s": observed.duration_s,
        "requests_per_s": len(done) / duration_s,
        "output_tokens_per_s": sum(record.num_tokens for record in done) / duration_s,
        "input_tokens_per_s": sum(record.input_tokens for record in done) / duration_s,
    }
    num_good = sum(map(slo.is_met, records))
    result |= {"slo_share": num_good / len(records), "good_requests_per_s": num_good / duration_s}
    for name, values_s in times_of(done).items():
        result |= percentiles_ms(name, values_s)
    result |= _gaps(observed.gaps) | _workers(observed)
    if price_per_hour is not None:
        cost = price_per_hour * sum(observed.paid_worker_s.values()) / HOUR_S
        result["cost"] = cost
        tokens_per_s = result["output_tokens_per_s"]
        price = price_per_million(cost * HOUR_S / duration_s, tokens_per_s)
        if price is not None:
            result["price_per_million_output_tokens"] = price
    return result


def by_hour(observed: Observed, slo: Slo) -> list[Figures]:
    """Figures of each hour's arrivals, and the mean number of workers in it."""
    hours: dict[int, list[Record]] = {}
    for record in observed.records:
        hours.setdefault(int(record.arrival_s // HOUR_S), []).append(record)
    return [_hour(hour, hours[hour], observed.samples, slo) for hour in sorted(hours)]


def _hour(hour: int, records: Sequence[Record], samples: Sequence[Sample], slo: Slo) -> Figures:
    within = [sample for sample in samples if hour <= sample.at_s / HOUR_S < hour + 1]
    result: Figures = {"hour": hour, "requests_per_s": len(records) / HOUR_S}
    for role in WorkerRole:
        counts = [sample.roles[role].num_workers for sample in within]
        if counts:
            result[f"{role.value}_workers"] = sum(counts) / len(counts)
    result["slo_share"] = sum(map(slo.is_met, records)) / len(records)
    return result | percentiles_ms("ttft", times_of(records)["ttft"], (50, 99))


def _gaps(gaps: Counter[float]) -> Figures:
    """Percentiles of gaps that are counted by length: the length that this share of them does not exceed."""
    lengths = sorted(gaps)
    sums: list[int] = []
    for length in lengths:
        sums.append((sums[-1] if sums else 0) + gaps[length])
    if not sums:
        return {}
    at = (min(bisect_right(sums, sums[-1] * percent / 100), len(sums) - 1) for percent in PERCENTS)
    return {f"gap_p{percent}_ms": 1000 * lengths[index] for percent, index in zip(PERCENTS, at, strict=True)}


def _workers(observed: Observed) -> Figures:
    """Queue and utilisation: means over time, `busy` over all paid time of the role."""
    samples = observed.samples
    queued = [sample.num_queued for sample in samples]
    result: Figures = {"queued_mean": sum(queued) / len(queued), "queued_max": max(queued)}
    for role in WorkerRole:
        paid_s = observed.paid_worker_s[role]
        of_role = [sample.roles[role] for sample in samples]
        num_workers = sum(sample.num_workers for sample in of_role)
        result[f"{role.value}_workers"] = num_workers / len(samples)
        result[f"{role.value}_busy"] = of_role[-1].busy_s / paid_s if paid_s else 0.0
        result[f"{role.value}_kv"] = sum(sample.kv for sample in of_role) / max(1, num_workers)
        result[f"{role.value}_worker_hours"] = paid_s / HOUR_S
    return result
