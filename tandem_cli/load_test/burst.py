"""Measures how a burst of long prompts disturbs steady streams."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from tandem_cli.load_test.figures import Slo, figures, percentile
from tandem_cli.load_test.jobs import Job
from tandem_cli.load_test.load import LoadGenerator, together
from tandem_cli.load_test.records import Outcome, Record, Run, RunFailed

STEADY, BURST = "steady", "burst"
BEGUN, ARRIVED, OVER = "streams_begun", "burst_arrived", "burst_over"
_POLL_S = 0.05


async def run_burst(
    generator: LoadGenerator, *, steady: Iterator[Job], num_streams: int, burst: Sequence[Job], lead_s: float
) -> Run:
    """Keep `num_streams` streams running, and send all jobs of `burst` at once.

    The burst arrives `lead_s` after every stream has started. The streams stop `lead_s` after its last answer.
    """
    recorder = generator.recorder

    async def stream() -> None:
        for job in steady:
            record = await generator.send(job, recorder.now_s(), STEADY)
            if record.outcome is not Outcome.OK:
                raise RunFailed(f"a steady stream failed: {record.error}")

    all_streams = together(stream() for _ in range(num_streams))
    streams = asyncio.create_task(all_streams)
    try:
        while sum(bool(record.token_s) for record in recorder.records) < num_streams:
            await _unless_ended(streams, _POLL_S)
        recorder.mark(BEGUN)
        await _unless_ended(streams, lead_s)
        recorder.mark(ARRIVED)
        arrival_s = recorder.now_s()
        await together(generator.send(job, arrival_s, BURST) for job in burst)
        recorder.mark(OVER)
        await _unless_ended(streams, lead_s)
    finally:
        streams.cancel()
        await asyncio.gather(streams, return_exceptions=True)
    return recorder.close()


async def _unless_ended(streams: asyncio.Task[None], wait_s: float) -> None:
    """Wait for `wait_s`. Raises the error of the streams if they fail meanwhile."""
    await asyncio.wait([streams], timeout=wait_s)
    if streams.done():
        streams.result()


def gaps_over_time(records: Sequence[Record]) -> list[tuple[float, float]]:
    """Gaps between tokens of the steady streams as (end of the gap, length), in seconds, ordered by time."""
    steady = (record for record in records if record.group == STEADY)
    gaps = ((later, later - earlier) for record in steady for earlier, later in pairwise(record.token_s))
    return sorted(gaps)


def disturbed_until_s(run: Run) -> float:
    """The time of the last first token in the burst. After it, all requests of the burst only decode."""
    first = (record.token_s[0] for record in run.records if record.group == BURST and record.token_s)
    return max(first, default=run.marks[OVER])


def burst_figures(run: Run, slo: Slo) -> dict[str, float]:
    """Figures of the requests in the burst, and gaps of the steady streams before the burst and during its prefill.

    Rates are omitted, because a run with idle time at its ends has no meaningful rate.
    """
    burst = replace(run, records=[record for record in run.records if record.group == BURST])
    result = {name: value for name, value in figures(burst, slo).items() if not name.endswith("_per_s")}
    arrived_s, prefill_end_s = run.marks[ARRIVED], disturbed_until_s(run)
    gaps = gaps_over_time(run.records)
    phases = {
        "before": [gap for at, gap in gaps if run.marks[BEGUN] < at < arrived_s],
        "during": [gap for at, gap in gaps if at >= arrived_s and at - gap < prefill_end_s],
    }
    result["burst_prefill_ms"] = 1000 * (prefill_end_s - arrived_s)
    for phase, values in phases.items():
        if values:
            result |= {f"steady_gap_{phase}_p{percent}_ms": 1000 * percentile(values, percent) for percent in (50, 99)}
            result[f"steady_gap_{phase}_max_ms"] = 1000 * max(values)
    return result
