"""Streams that run all the time beside whatever is done to a mesh, over gRPC and as server-sent events.

    async with Neighbours.beside(running) as neighbours:
        async with neighbours.period() as calm: ...
        async with neighbours.period() as hit: ...
    neighbours.state(evidence, "4 MB texts", calm, hit)

Every answer is held against one learnt before anything was done.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx2

import tandem
from tests.chaos.history import percentile
from tests.chaos.sse import SseAnswer, body_of, read_completion, sse_faults
from tests.e2e.mesh_process import MeshProcess
from tests.evidence import Evidence

CALM_S = 6.0
_CLIENTS_PER_WAY = 2
_THINK_S = 0.1
_MIDDLE = 10
_TIMEOUT_S = 120.0
_PROMPTS = ("What is 12 + 30?", "The", "One, two, three,", "Say it again:")


def asks(max_new_tokens: int = 120) -> list[dict[str, Any]]:
    """Greedy and seeded by turns."""
    return [
        {
            "prompt": prompt,
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
            "temperature": 0.9 if number % 2 else 0.0,
            "seed": number,
        }
        for number, prompt in enumerate(_PROMPTS)
    ]


@dataclass(slots=True)
class Period:
    """Some time, from its begin to its end."""

    began_s: float
    ended_s: float = 0.0

    def meets(self, began_s: float, ended_s: float) -> bool:
        """True if the two overlap."""
        assert self.ended_s, "the period is not over"
        return began_s <= self.ended_s and ended_s >= self.began_s


@dataclass
class Neighbours:
    """Other clients, and their observations so far. `waits` and `firsts`: begin and end of waits between tokens, and
    for the first.
    """

    running: MeshProcess
    asks: list[Mapping[str, Any]]
    answers: list[tandem.Choice]
    waits: list[tuple[float, float]] = field(default_factory=list)
    firsts: list[tuple[float, float]] = field(default_factory=list)
    pings: list[tuple[float, float]] = field(default_factory=list)
    endings: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    num_running: int = 0
    """Streams in their middle: some tokens have come, and more are to come."""
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _clients: list[asyncio.Task[None]] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def beside(cls, running: MeshProcess) -> AsyncIterator["Neighbours"]:
        """Learn the answers, then ask without end. At the end all streams are waited for."""
        requests = asks()
        async with tandem.AsyncClient(running.address) as client:
            answers = [(await client.generate(**ask)).choices[0] for ask in requests]
        neighbours = cls(running, requests, answers)
        async with asyncio.TaskGroup() as tasks:
            for number in range(_CLIENTS_PER_WAY):
                neighbours._clients.append(tasks.create_task(neighbours._ask_grpc(number)))
                neighbours._clients.append(tasks.create_task(neighbours._ask_http(number + _CLIENTS_PER_WAY)))
            tasks.create_task(neighbours._ping())
            try:
                yield neighbours
            finally:
                neighbours._stop.set()

    async def end(self) -> None:
        """No new streams; return when those that run have ended."""
        self._stop.set()
        await asyncio.wait(self._clients)

    @asynccontextmanager
    async def period(self, at_least_s: float = 0.0) -> AsyncIterator[Period]:
        """From here to the end of the block, and `at_least_s`."""
        period = Period(time.monotonic())
        yield period
        await asyncio.sleep(period.began_s + at_least_s - time.monotonic())
        period.ended_s = time.monotonic()

    async def calm(self) -> Period:
        """Some seconds in which nothing is done."""
        async with self.period(CALM_S) as period:
            pass
        return period

    async def all_running(self) -> int:
        """Return, with their number, when every neighbour is in the middle of a stream."""
        while self.num_running < 2 * _CLIENTS_PER_WAY:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return self.num_running

    async def new_streams(self, count: int = 2 * _CLIENTS_PER_WAY) -> None:
        """Return when so many streams that began after now have ended well."""
        wanted = self.endings["finished"] + count + 2 * _CLIENTS_PER_WAY
        while self.endings["finished"] < wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def gap_p99_s(self, period: Period) -> float:
        """Between two tokens of a stream."""
        return percentile(_lengths(self.waits, period), 99)

    def longest_s(self, period: Period) -> float:
        """The longest time without a token in a stream that had begun."""
        return max(_lengths(self.waits, period), default=0.0)

    def slowest_first_s(self, period: Period) -> float:
        """The longest time to a first token."""
        return max(_lengths(self.firsts, period), default=0.0)

    def slowest_ping_s(self, period: Period) -> float:
        """The slowest GET /ping. Failed pings count for as long as pings failed."""
        return max(_lengths(self.pings, period), default=0.0)

    async def _ask_grpc(self, number: int) -> None:
        async with tandem.AsyncClient(self.running.address) as client:
            while not self._stop.is_set():
                events, times_s = list[tandem.TokenEvent](), [time.monotonic()]
                try:
                    async with contextlib.aclosing(client.stream(**self.asks[number], timeout=_TIMEOUT_S)) as stream:
                        async for event in stream:
                            events.append(event)
                            self._took_token(times_s)
                    self._ended("finished", "", times_s)
                except tandem.TandemError as error:
                    self._ended(type(error).__name__, f"gRPC: {error}", times_s)
                self._compare_grpc(number, events)
                await asyncio.sleep(_THINK_S)

    def _compare_grpc(self, number: int, events: list[tandem.TokenEvent]) -> None:
        expected, ids = self.answers[number], [event.token.id for event in events if event.token]
        has_ended = bool(events) and events[-1].finish_reason is not None
        if ids != [token.id for token in expected.tokens][: None if has_ended else len(ids)]:
            self.wrong.append(f"gRPC {number}: {len(ids)} tokens differ")
        if has_ended and "".join(event.text for event in events) != expected.text:
            self.wrong.append(f"gRPC {number}: the text differs")
        if sum(event.finish_reason is not None for event in events) > 1:
            self.wrong.append(f"gRPC {number}: ended more than once")

    async def _ask_http(self, number: int) -> None:
        async with httpx2.AsyncClient(base_url=self.running.http, timeout=_TIMEOUT_S) as http:
            while not self._stop.is_set():
                times_s = [time.monotonic()]
                answer = SseAnswer(on_token=lambda times_s=times_s: self._took_token(times_s))
                await read_completion(http, body_of(self.asks[number]), answer)
                self._ended(answer.ending, f"HTTP: {answer.error}", times_s)
                self.wrong += [f"HTTP {number}: {fault}" for fault in sse_faults(answer, self.answers[number])]
                await asyncio.sleep(_THINK_S)

    def _took_token(self, times_s: list[float]) -> None:
        """`times_s`: of the request, then of its tokens."""
        self.num_running += len(times_s) == _MIDDLE
        times_s.append(time.monotonic())

    def _ended(self, ending: str, error: str, times_s: list[float]) -> None:
        now_s, has_begun = time.monotonic(), len(times_s) > 1
        self.num_running -= len(times_s) > _MIDDLE
        self.endings[ending] += 1
        if ending != "finished":
            (self.broken if has_begun else self.refused).append(f"{ending}: {error}")
        self.firsts.append((times_s[0], times_s[1] if has_begun else now_s))
        self.waits += [*pairwise(times_s[1:])]
        if has_begun and ending != "finished":
            self.waits.append((times_s[-1], now_s))

    async def _ping(self) -> None:
        """A new connection each time, as a load balancer makes."""
        began_s = time.monotonic()
        while not self._stop.is_set():
            if await self._is_pinged():
                self.pings.append((began_s, time.monotonic()))
                await asyncio.sleep(_THINK_S)
                began_s = time.monotonic()
            else:
                await asyncio.sleep(_THINK_S)
        self.pings.append((began_s, time.monotonic()))

    async def _is_pinged(self) -> bool:
        with contextlib.suppress(httpx2.TransportError):
            async with httpx2.AsyncClient(base_url=self.running.http, timeout=_TIMEOUT_S) as http:
                return (await http.get("/ping")).status_code == 200
        return False

    def state(self, evidence: Evidence, what: str, calm: Period, hit: Period, *, may_refuse: bool = False) -> None:
        """Nothing wrong, nothing broken, nothing refused unless it may be; and how the waits have changed."""
        for kind, found in (("wrong", self.wrong), ("broken", self.broken), ("refused", self.refused)):
            ok = not found or (may_refuse and kind == "refused")
            evidence("R2", f"neighbours' streams {kind}: {what}", _few(found), target="0", ok=ok)
        ours, theirs = self.gap_p99_s(hit), self.gap_p99_s(calm)
        measured = f"{1000 * ours:.0f} ms, longest {1000 * self.longest_s(hit):.0f} ms; calm: {1000 * theirs:.0f} ms"
        ok = ours <= 2 * theirs
        evidence("R19", f"neighbours' waits p99: {what}", measured, target="<= 2x calm", ok=ok, is_reported_only=True)


def _lengths(spans: list[tuple[float, float]], period: Period) -> list[float]:
    return [ended_s - began_s for began_s, ended_s in spans if period.meets(began_s, ended_s)]


def _few(found: list[str]) -> str:
    return f"{len(found)}: {'; '.join(found[:3])[:200]}" if found else "0"
