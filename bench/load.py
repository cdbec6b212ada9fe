"""A closed loop of clients: each sends its next request when the last one has ended."""

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import tandem

Send = Callable[[list[int], int, Callable[[], None]], Awaitable[int]]
"""`send(prompt, max_new_tokens, on_token)` runs one request and returns its number of tokens."""


def through(client: tandem.AsyncClient) -> Send:
    """Send requests to a mesh."""

    async def send(prompt: list[int], max_new_tokens: int, on_token: Callable[[], None]) -> int:
        count = 0
        async for _ in client.stream(token_ids=prompt, max_new_tokens=max_new_tokens, ignore_eos=True):
            on_token()
            count += 1
        return count

    return send


@dataclass(frozen=True, slots=True)
class Workload:
    """How much is asked for. Prompts are random, so no prefix is shared."""

    num_clients: int
    requests_per_client: int = 2
    input_tokens: int = 256
    output_tokens: int = 64
    vocab_size: int = 32000
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        """One for each request."""
        rng = random.Random(self.seed)
        count = self.num_clients * self.requests_per_client
        return [[rng.randrange(3, self.vocab_size) for _ in range(self.input_tokens)] for _ in range(count)]


def workload(num_clients: int) -> Workload:
    """Two requests for each client; one when there are many, which is enough to fill the batch."""
    return Workload(num_clients, requests_per_client=2 if num_clients <= 8 else 1)


@dataclass(slots=True)
class Measured:
    """One run. Times in seconds; gaps are between tokens of one stream."""

    duration_s: float = 0.0
    num_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the whole run, prefill included."""
        return self.num_tokens / self.duration_s


class StreamClock:
    """Notes when the tokens of one stream come."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self._last = time.perf_counter()
        self._is_first = True

    def on_token(self) -> None:
        """A token is here."""
        now = time.perf_counter()
        (self._measured.ttft_s if self._is_first else self._measured.gaps_s).append(now - self._last)
        self._last, self._is_first = now, False


async def run_closed_loop(workload: Workload, send: Send) -> Measured:
    """Run the workload through `send`."""
    prompts = iter(workload.prompts())
    measured = Measured()

    async def client() -> None:
        for prompt in prompts:
            clock = StreamClock(measured)
            count = await send(prompt, workload.output_tokens, clock.on_token)
            measured.num_tokens += count  # in one statement with await, it would lose what others add meanwhile

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(workload.num_clients)))
    measured.duration_s = time.perf_counter() - started
    return measured


def median_run(runs: Sequence[Measured]) -> Measured:
    """The run with the median throughput."""
    ordered = sorted(runs, key=lambda run: run.tokens_per_s)
    return ordered[len(ordered) // 2]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[round(percent) - 1]
