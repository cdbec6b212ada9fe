"""The load generator: closed loops of clients, open loops of arrivals, bursts, and threads of the synchronous SDK.

A closed loop fixes the number of requests in flight: each client sends its next request when the last one has ended. An
open loop fixes the rate: requests arrive at given times, regardless of the state of the server. A burst arrives at once
beside steady streams. Requests go to a `Target`; `mesh_target` is a mesh behind its router.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import tandem
from mesh.tasks import cancel_all, together
from tandem_cli.load_test.figures import (
    ARRIVED,
    BEGUN,
    BURST,
    OVER,
    STEADY,
    Failed,
    OnDone,
    Outcome,
    Record,
    Refused,
    Run,
    RunFailed,
    RunRecorder,
)
from tandem_cli.load_test.jobs import Job

_FINISH_REASONS = (tandem.FinishReason.LENGTH, tandem.FinishReason.EOS_TOKEN, tandem.FinishReason.STOP_SEQUENCE)
_POLL_S = 0.05

OnToken: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The tokens of an answer, as the server counted them."""

    num_tokens: int
    input_tokens: int


Target: TypeAlias = Callable[[Job, OnToken], Awaitable[TokenCounts]]
"""`target(job, on_token)` runs a request and calls `on_token` per message with tokens. Raises Refused or Failed."""


def poisson_arrivals(rate: float, count: int, seed: int | str) -> list[float]:
    """`count` arrival times in seconds of a Poisson process with `rate` arrivals per second, determined by `seed`."""
    rng = random.Random(seed)
    times: list[float] = []
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


class LoadGenerator:
    """Sends jobs to a target and records them. Use it for one run."""

    def __init__(self, target: Target, on_done: OnDone = lambda _: None) -> None:
        self._target = target
        self.recorder = RunRecorder(on_done)

    async def closed_loop(self, jobs: Sequence[Job], num_clients: int) -> Run:
        """Run all jobs with `num_clients` clients, each of which sends its next job when the last one has ended."""
        unsent = iter(jobs)

        async def client() -> None:
            for job in unsent:
                await self.send(job, self.recorder.now_s())

        await together(client() for _ in range(num_clients))
        return self.recorder.close()

    async def open_loop(self, jobs: Sequence[Job], arrivals_s: Sequence[float]) -> Run:
        """Send each job at its arrival time."""

        async def arrive(job: Job, arrival_s: float) -> None:
            await asyncio.sleep(max(0.0, arrival_s - self.recorder.now_s()))
            await self.send(job, arrival_s)

        await together(arrive(job, at_s) for job, at_s in zip(jobs, arrivals_s, strict=True))
        return self.recorder.close()

    async def send(self, job: Job, arrival_s: float, group: str = "") -> Record:
        """Send one request and return its record."""
        with self.recorder.entry(job.max_tokens, arrival_s, group) as record:
            reply = await self._target(job, lambda: record.token_s.append(self.recorder.now_s()))
            record.num_tokens, record.input_tokens = reply.num_tokens, reply.input_tokens
        return record


def _arguments(job: Job, model: str | None) -> tandem.GenerateArguments:
    """The arguments of the SDK for a job."""
    return {
        "token_ids": job.token_ids,
        "prompt": job.prompt,
        "messages": job.messages,
        "model": model,
        "max_new_tokens": job.max_tokens,
        "ignore_eos": job.ignore_eos,
    }


OnEvent: TypeAlias = Callable[[Job, tandem.TokenEvent], None]


def mesh_target(
    client: tandem.AsyncClient, model: str | None = None, on_event: OnEvent = lambda job, event: None
) -> Target:
    """A target that sends jobs to a mesh. `client` must not retry, which would hide refusals. `on_event` is called with
    all events of the answers.
    """

    async def send(job: Job, on_token: OnToken) -> TokenCounts:
        usage = tandem.Usage()
        reason: tandem.FinishReason | None = None
        try:
            async for event in client.stream(**_arguments(job, model)):
                on_event(job, event)
                if event.token is not None:
                    on_token()
                reason, usage = event.finish_reason, event.usage or usage
        except tandem.TandemError as error:
            raise as_failure(error) from error
        return _complete_reply(reason, usage)

    return send


def _complete_reply(reason: tandem.FinishReason | None, usage: tandem.Usage) -> TokenCounts:
    """The token counts of a complete answer. Raises Failed for an incomplete one."""
    if reason not in _FINISH_REASONS:
        raise Failed(f"the answer ended with: {reason}")
    return TokenCounts(usage.completion_tokens, usage.prompt_tokens)


def as_failure(error: tandem.TandemError) -> Refused | Failed:
    """Convert an error of the SDK to one of the load generator."""
    kind = Refused if isinstance(error, tandem.Overloaded) else Failed
    return kind(f"{type(error).__name__}: {error}")


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
        await cancel_all([streams])
    return recorder.close()


async def _unless_ended(streams: asyncio.Task[None], wait_s: float) -> None:
    """Wait for `wait_s`. Raises the error of the streams if they fail meanwhile."""
    await asyncio.wait([streams], timeout=wait_s)
    if streams.done():
        streams.result()


def run_threads(client: tandem.Client, jobs: Sequence[Job], num_threads: int, on_done: OnDone) -> Run:
    """Run all jobs with `num_threads` threads that share one client. `on_done` is called in those threads."""
    recorder = RunRecorder(on_done, is_streamed=False)

    def send(job: Job) -> None:
        with recorder.entry(job.max_tokens, recorder.now_s()) as record:
            try:
                result = client.generate(**_arguments(job, None))
            except tandem.TandemError as error:
                raise as_failure(error) from error
            reply = _complete_reply(result.finish_reason, result.usage)
            record.num_tokens, record.input_tokens = reply.num_tokens, reply.input_tokens

    with ThreadPoolExecutor(num_threads) as threads:
        for _ in threads.map(send, jobs):
            pass  # raises the error of a thread
    return recorder.close()
