"""A closed loop over random prompts, of any server that takes token ids: the load of most benchmarks here.

Failures end a run: what is measured is the speed of a server that answers everything.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import tandem
from tandem_cli.load_test.jobs import Job, Lengths, random_jobs
from tandem_cli.load_test.load_generator import LoadGenerator, OnToken, TokenCounts

Send: TypeAlias = Callable[[list[int], int, OnToken], Awaitable[int]]
"""`send(prompt, max_new_tokens, on_token)` runs one request and returns its number of tokens."""


def through(client: tandem.AsyncClient) -> Send:
    """A `Send` that sends requests to a mesh."""

    async def send(prompt: list[int], max_new_tokens: int, on_token: OnToken) -> int:
        count = 0
        async for _ in client.stream(token_ids=prompt, max_new_tokens=max_new_tokens, ignore_eos=True):
            on_token()
            count += 1
        return count

    return send


@dataclass(frozen=True, slots=True)
class Workload:
    """Size of a closed loop. Prompts are random and share no prefix, neither with each other nor with other workloads.
    Otherwise prefix caches, filled by a warm-up or a smaller load, would replace work of the engine."""

    num_clients: int
    requests_per_client: int = 2
    input_tokens: int = 256
    output_tokens: int = 64
    vocab_size: int = 32000
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        """Token ids of the prompt of each request."""
        return [list(job.token_ids or ()) for job in self.jobs()]

    def jobs(self) -> list[Job]:
        """One job per request, always the same for equal workloads."""
        lengths = Lengths(self.input_tokens, self.output_tokens, self.vocab_size)
        sizes = (self.num_clients, self.requests_per_client, self.input_tokens, self.output_tokens)
        return random_jobs(lengths, self.num_clients * self.requests_per_client, f"{self.seed}/{sizes}")


@dataclass(slots=True)
class Measured:
    """Results of one run without failures. Times are in seconds; gaps are between tokens of one stream."""

    duration_s: float = 0.0
    num_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of the complete run, prefill included."""
        return self.num_tokens / self.duration_s


async def run_closed_loop(workload: Workload, send: Send) -> Measured:
    """Run the workload through `send`. An error of `send` ends the run and is raised."""

    async def target(job: Job, on_token: OnToken) -> TokenCounts:
        prompt = list(job.token_ids or ())
        return TokenCounts(await send(prompt, job.max_tokens, on_token), len(prompt))

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
