"""Runs a benchmark. Arms take turns, so that other load on the machine affects all of them equally."""

import asyncio
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace

from tandem_cli.load_test.benchmark import Benchmark, Case, Kind
from tandem_cli.load_test.endpoints import Endpoint, Opener
from tandem_cli.load_test.figures import OnDone, Record, Run, RunFailed
from tandem_cli.load_test.jobs import Job, Lengths, random_jobs
from tandem_cli.load_test.load_generator import LoadGenerator, poisson_arrivals, run_burst, run_threads
from tandem_cli.load_test.report import Report

_STEADY_INPUT_TOKENS = 32


class Watcher:
    """Receives the events of a sweep. This base class ignores them."""

    def opening(self, arm: str) -> None:
        """Called before the arm is started."""

    def begins(self, arm: str, case: Case, repeat: int) -> None:
        """Called before a run of `case`. `repeat` counts from 0."""

    def request_done(self, record: Record) -> None:
        """Called when a request has ended, in any thread."""


class Sweep:
    """Runs one benchmark on several arms and adds the results to a report."""

    def __init__(self, benchmark: Benchmark, arms: Mapping[str, Opener], report: Report, watcher: Watcher) -> None:
        self._benchmark = benchmark
        self._arms = arms
        self._report = report
        self._watcher = watcher

    async def run(self, after_round: Callable[[], None] = lambda: None) -> None:
        """Measure each arm once per round. A single arm stays open over all rounds."""
        stack, open_arm, endpoint = AsyncExitStack(), "", None
        async with stack:
            for repeat in range(self._benchmark.repeats):
                for arm, opener in self._arms.items():
                    if arm != open_arm or endpoint is None:
                        await stack.aclose()
                        self._watcher.opening(arm)
                        endpoint, open_arm = await stack.enter_async_context(opener()), arm
                        self._report.settings.setdefault("endpoints", {})[arm] = endpoint.about
                        await self._warm_up(endpoint)
                    await self._round(arm, endpoint, repeat)
                after_round()

    async def _round(self, arm: str, endpoint: Endpoint, repeat: int) -> None:
        for case in self._benchmark.cases():
            self._watcher.begins(arm, case, repeat)
            run = await run_case(self._benchmark, case, endpoint, repeat, self._watcher.request_done)
            self._report.point(arm, case).runs.append(run)

    async def _warm_up(self, endpoint: Endpoint) -> None:
        """Send unrecorded requests to compile kernels and touch memory. Raises RunFailed if all of them fail."""
        case = self._benchmark.cases()[0]
        jobs = self._benchmark.jobs(case, _lengths(self._benchmark, case, endpoint), repeat=-1)[
            : self._benchmark.warmup
        ]
        run = await LoadGenerator(endpoint.target).closed_loop(jobs, 1)
        errors = list(run.errors())
        if jobs and len(errors) and all(record.error for record in run.records):
            raise RunFailed(f"no request of the warm-up succeeded: {errors[0]}")


async def run_case(benchmark: Benchmark, case: Case, endpoint: Endpoint, repeat: int, on_done: OnDone) -> Run:
    """Run one case once. `on_done` is called with the record of each request, in any thread."""
    lengths = _lengths(benchmark, case, endpoint)
    jobs = benchmark.jobs(case, lengths, repeat)
    generator = LoadGenerator(endpoint.target, on_done)
    if case.kind is Kind.CONCURRENCY:
        return await generator.closed_loop(jobs, int(case.value))
    if case.kind is Kind.RATE:
        return await generator.open_loop(jobs, poisson_arrivals(case.value, len(jobs), f"{benchmark.seed}/{repeat}"))
    if case.kind is Kind.TRACE:
        return await generator.open_loop(jobs, [job.arrival_s or 0.0 for job in jobs])
    if case.kind is Kind.BURST:
        limit = (endpoint.max_total_tokens or sys.maxsize) - _STEADY_INPUT_TOKENS
        short = replace(
            lengths, input_tokens=_STEADY_INPUT_TOKENS, output_tokens=min(benchmark.burst.stream_tokens, limit)
        )
        steady = _endless(short, f"{benchmark.seed}/steady/{repeat}")
        return await run_burst(
            generator, steady=steady, num_streams=benchmark.burst.num_streams, burst=jobs, lead_s=benchmark.burst.lead_s
        )
    if endpoint.blocking is None:
        raise RunFailed("threads use the SDK: they need a Tandem mesh")
    client = endpoint.blocking()
    try:
        return await asyncio.to_thread(run_threads, client, jobs, int(case.value), on_done)
    finally:
        await asyncio.to_thread(client.close)


def _lengths(benchmark: Benchmark, case: Case, endpoint: Endpoint) -> Lengths:
    tokens = benchmark.burst.tokens if case.kind is Kind.BURST else case.input_tokens or benchmark.input_tokens[0]
    return Lengths(tokens, benchmark.output_tokens, endpoint.vocab_size, endpoint.as_text)


def _endless(lengths: Lengths, seed: str) -> Iterator[Job]:
    return (random_jobs(lengths, 1, f"{seed}/{number}")[0] for number in itertools.count())
