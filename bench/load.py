"""The load generator: closed loops of clients, and open loops whose requests come when they come.

A closed loop holds the number of requests in flight: each client sends its next request when the last one has ended. An
open loop holds the rate: requests arrive at given times, however the server is doing.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tandem
from bench.figures import percentile as percentile
from bench.jobs import Job, Lengths, random_jobs
from bench.records import Books, OnDone, Record, Run

OnToken: TypeAlias = Callable[[], None]
Send: TypeAlias = Callable[[list[int], int, OnToken], Awaitable[int]]
"""`send(prompt, max_new_tokens, on_token)` runs one request and returns its number of tokens."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server counted."""

    num_tokens: int
    input_tokens: int


Target: TypeAlias = Callable[[Job, OnToken], Awaitable[Reply]]
"""`target(job, on_token)` runs a request and calls `on_token` for each message with tokens. Raises Refused, Failed."""


def poisson_arrivals(rate: float, count: int, seed: int | str) -> list[float]:
    """Times in seconds of `count` arrivals at `rate` for each second, memoryless; the same for the same seed."""
    rng = random.Random(seed)
    times: list[float] = []
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


class LoadGenerator:
    """Sends jobs to a target and keeps the books. Use it for one run."""

    def __init__(self, target: Target, on_done: OnDone = lambda _: None) -> None:
        self._target = target
        self.books = Books(on_done)

    async def closed_loop(self, jobs: Sequence[Job], num_clients: int) -> Run:
        """All jobs, by clients that take the next one when their last has ended."""
        waiting = iter(jobs)

        async def client() -> None:
            for job in waiting:
                await self.send(job, self.books.now_s())

        await together(client() for _ in range(num_clients))
        return self.books.close()

    async def open_loop(self, jobs: Sequence[Job], arrivals_s: Sequence[float]) -> Run:
        """Each job at its time."""

        async def arrive(job: Job, arrival_s: float) -> None:
            await asyncio.sleep(max(0.0, arrival_s - self.books.now_s()))
            await self.send(job, arrival_s)

        await together(arrive(job, at_s) for job, at_s in zip(jobs, arrivals_s, strict=True))
        return self.books.close()

    async def send(self, job: Job, arrival_s: float, group: str = "") -> Record:
        """One request, and its record."""
        with self.books.entry(job.max_tokens, arrival_s, group) as record:
            reply = await self._target(job, lambda: record.token_s.append(self.books.now_s()))
            record.num_tokens, record.input_tokens = reply.num_tokens, reply.input_tokens
        return record


async def together(work: Iterable[Coroutine[Any, Any, object]]) -> None:
    """All at once. The first error ends the others and is raised as it is."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def through(client: tandem.AsyncClient) -> Send:
    """Send requests to a mesh."""

    async def send(prompt: list[int], max_new_tokens: int, on_token: OnToken) -> int:
        count = 0
        async for _ in client.stream(token_ids=prompt, max_new_tokens=max_new_tokens, ignore_eos=True):
            on_token()
            count += 1
        return count

    return send


@dataclass(frozen=True, slots=True)
class Workload:
    """How much is asked for. Prompts are random: none shares a prefix with another, nor with any of another workload.
    Otherwise a prefix cache that a warm-up or a smaller load has filled would answer in place of the engine."""

    num_clients: int
    requests_per_client: int = 2
    input_tokens: int = 256
    output_tokens: int = 64
    vocab_size: int = 32000
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        """One for each request."""
        return [list(job.token_ids or ()) for job in self.jobs()]

    def jobs(self) -> list[Job]:
        """One for each request."""
        lengths = Lengths(self.input_tokens, self.output_tokens, self.vocab_size)
        sizes = (self.num_clients, self.requests_per_client, self.input_tokens, self.output_tokens)
        return random_jobs(lengths, self.num_clients * self.requests_per_client, f"{self.seed}/{sizes}")


@dataclass(slots=True)
class Measured:
    """One run without failures. Times in seconds; gaps are between tokens of one stream."""

    duration_s: float = 0.0
    num_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the whole run, prefill included."""
        return self.num_tokens / self.duration_s


async def run_closed_loop(workload: Workload, send: Send) -> Measured:
    """Run the workload through `send`. What `send` raises ends the run."""

    async def target(job: Job, on_token: OnToken) -> Reply:
        prompt = list(job.token_ids or ())
        return Reply(await send(prompt, job.max_tokens, on_token), len(prompt))

    run = await LoadGenerator(target).closed_loop(workload.jobs(), workload.num_clients)
    return Measured(
        run.duration_s,
        sum(record.num_tokens for record in run.records),
        [record.ttft_s for record in run.records if record.ttft_s is not None],
        [gap for record in run.records for gap in record.gaps_s],
    )


def median_run(runs: Sequence[Measured]) -> Measured:
    """The run with the median throughput."""
    ordered = sorted(runs, key=lambda run: run.tokens_per_s)
    return ordered[len(ordered) // 2]
