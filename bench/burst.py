"""A burst of long prompts into steady streams: who is disturbed, and for how long."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bench.figures import Slo, figures, percentile
from bench.jobs import Job
from bench.load import LoadGenerator, together
from bench.records import Outcome, Record, Run, RunFailed

STEADY, BURST = "steady", "burst"
BEGUN, ARRIVED, OVER = "streams_begun", "burst_arrived", "burst_over"
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class BurstPlan:
    """Streams that run all the time, and prompts that come all at once, `lead_s` after every stream has begun."""

    steady: Iterator[Job]
    num_streams: int
    burst: Sequence[Job]
    lead_s: float


async def run_burst(generator: LoadGenerator, plan: BurstPlan) -> Run:
    """Ends `lead_s` after the last answer of the burst; the steady streams are then stopped."""
    books = generator.books

    async def stream() -> None:
        for job in plan.steady:
            record = await generator.send(job, books.now_s(), STEADY)
            if record.outcome is not Outcome.OK:
                raise RunFailed(f"a steady stream failed: {record.error}")

    steady = together(stream() for _ in range(plan.num_streams))
    streams = asyncio.create_task(steady)
    try:
        while sum(bool(record.token_s) for record in books.records) < plan.num_streams:
            await _unless_ended(streams, _LOOK_S)
        books.mark(BEGUN)
        await _unless_ended(streams, plan.lead_s)
        books.mark(ARRIVED)
        arrival_s = books.now_s()
        await together(generator.send(job, arrival_s, BURST) for job in plan.burst)
        books.mark(OVER)
        await _unless_ended(streams, plan.lead_s)
    finally:
        streams.cancel()
        await asyncio.gather(streams, return_exceptions=True)
    return books.close()


async def _unless_ended(streams: asyncio.Task[None], wait_s: float) -> None:
    """Wait. Raises what the streams raised."""
    await asyncio.wait([streams], timeout=wait_s)
    if streams.done():
        streams.result()


def gaps_over_time(records: Sequence[Record]) -> list[tuple[float, float]]:
    """(when the gap ended, how long it was) of the steady streams, in seconds, by time."""
    steady = (record for record in records if record.group == STEADY)
    gaps = ((later, later - earlier) for record in steady for earlier, later in pairwise(record.token_s))
    return sorted(gaps)


def disturbed_until_s(run: Run) -> float:
    """When the last prompt of the burst had its first token: from then on all of them just decode."""
    first = (record.token_s[0] for record in run.records if record.group == BURST and record.token_s)
    return max(first, default=run.marks[OVER])


def burst_figures(run: Run, slo: Slo) -> dict[str, float]:
    """Figures of the burst's own requests, and the steady streams' gaps before it and while its prompts were computed.

    Rates are left out: a rate over a run with idle ends says nothing.
    """
    own = replace(run, records=[record for record in run.records if record.group == BURST])
    found = {name: value for name, value in figures(own, slo).items() if not name.endswith("_per_s")}
    arrived, until = run.marks[ARRIVED], disturbed_until_s(run)
    gaps = gaps_over_time(run.records)
    phases = {
        "before": [gap for at, gap in gaps if run.marks[BEGUN] < at < arrived],
        "during": [gap for at, gap in gaps if at >= arrived and at - gap < until],
    }
    found["burst_prefill_ms"] = 1000 * (until - arrived)
    for phase, values in phases.items():
        if values:
            found |= {f"steady_gap_{phase}_p{percent}_ms": 1000 * percentile(values, percent) for percent in (50, 99)}
            found[f"steady_gap_{phase}_max_ms"] = 1000 * max(values)
    return found
