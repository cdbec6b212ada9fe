"""Clients that ask without pause, at all routers, and hold every answer against an undisturbed one."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import tandem
from tests.chaos.cluster import Cluster
from tests.chaos.history import CANCELLED, FINISHED, Disturbance, History, faults_of

TIMEOUT_S = 60.0
_COME_BACK_S = 0.5
_PROMPT_LENGTHS = (1, 3, 16, 17, 40, 64, 120, 200, 300, 380)
_NEW_TOKENS = (8, 20, 1, 60, 40, 90)
_OWN_DEADLINES_S = (0.05, 0.3, 2.0, 6.0)

Ask = Mapping[str, Any]
"""Arguments of `AsyncClient.stream`."""


def asks() -> dict[str, Ask]:
    """The fixed set: lengths, greedy and seeded, truncations, penalties, log-probs, two choices at once."""
    asks: dict[str, Ask] = {}
    for i in range(24):
        length = _PROMPT_LENGTHS[i % len(_PROMPT_LENGTHS)]
        ask: dict[str, Any] = {
            "token_ids": [(13 * i + j * (1 + i % 3)) % 256 for j in range(length)],
            "max_new_tokens": _NEW_TOKENS[i % len(_NEW_TOKENS)],
            "temperature": 0.9 if i % 2 else 0.0,
            "seed": i,
            "top_logprobs": 2 if i % 4 == 0 else None,
            "top_p": 0.9 if i % 4 == 1 else None,
            "top_k": 20 if i % 4 == 3 else None,
            "presence_penalty": 0.5 if i % 3 == 0 else None,
            "frequency_penalty": 0.3 if i % 5 == 0 else None,
            "repetition_penalty": 1.2 if i % 7 == 0 else None,
            "n": 2 if i == 13 else None,
            "ignore_eos": i % 6 != 5,
        }
        asks[f"ask-{i}"] = {name: value for name, value in ask.items() if value is not None}
    return asks


@dataclass
class Catalogue:
    """The requests with their undisturbed answers."""

    asks: dict[str, Ask]
    answers: dict[str, tandem.Result] = field(default_factory=dict)

    @classmethod
    async def learn(cls, cluster: Cluster) -> "Catalogue":
        """Ask everything at one router, undisturbed; add requests that stop at something their answers contain."""
        catalogue = cls(asks())
        async with cluster.client(cluster.routers[0], direct=True) as client:
            for name, ask in list(catalogue.asks.items()):
                answer = catalogue.answers[name] = await client.generate(**ask)
                if name in ("ask-3", "ask-15"):
                    catalogue._add_stops(name, answer)
            for name in catalogue.asks.keys() - catalogue.answers.keys():
                catalogue.answers[name] = await client.generate(**catalogue.asks[name])
        return catalogue

    def plain_greedy(self) -> list[str]:
        """Requests whose answer is the model's first choice at each step."""
        shaping = ("temperature", "presence_penalty", "frequency_penalty", "repetition_penalty")
        return [name for name, ask in self.asks.items() if not any(ask.get(parameter) for parameter in shaping)]

    def _add_stops(self, name: str, answer: tandem.Result) -> None:
        middle = len(answer.tokens) // 2
        self.asks[f"{name}-stop-token"] = {**self.asks[name], "stop_token_ids": [answer.tokens[middle].id]}
        text = "".join(token.text for token in answer.tokens[middle : middle + 2])
        if text:
            self.asks[f"{name}-stop-text"] = {**self.asks[name], "stop": [text]}


@dataclass
class Load:
    """All clients of one run, and what they have seen."""

    cluster: Cluster
    catalogue: Catalogue
    think_s: float = 0.05
    """What a client waits between two requests, on average."""
    timeout_s: float = TIMEOUT_S
    histories: list[History] = field(default_factory=list)
    disturbances: list[Disturbance] = field(default_factory=list)

    @asynccontextmanager
    async def clients(self, num_per_router: int) -> AsyncIterator[None]:
        """That many clients at each router for as long as this is open. Raises what a client raises."""
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for number, router in enumerate(self.cluster.routers):
                for seed in range(num_per_router):
                    tasks.create_task(self.run_client(router, 1000 * number + seed, stop))
            try:
                yield
            finally:
                stop.set()

    async def run_client(self, router: str, seed: int, stop: asyncio.Event) -> None:
        """One client's requests until told to stop. Some it cancels, some have a short deadline."""
        rng = random.Random(seed)
        async with self.cluster.client(router) as client:
            while not stop.is_set():
                history = await self.ask(client, router, rng)
                if history.has_failed:
                    await asyncio.sleep(rng.uniform(0, _COME_BACK_S))
                    with contextlib.suppress(tandem.TandemError):
                        await client.wait_ready(self.timeout_s)
                await asyncio.sleep(rng.uniform(0, 2 * self.think_s))

    async def ask(self, client: tandem.AsyncClient, router: str, rng: random.Random) -> History:
        """One request of the set, with one of the things that clients do."""
        name = rng.choice(sorted(self.catalogue.asks))
        mood = rng.random()
        own_deadline_s = rng.choice(_OWN_DEADLINES_S) if mood < 0.08 else None
        leave_after = rng.randrange(20) if 0.08 <= mood < 0.16 else None
        leave_at_s = rng.uniform(0, 0.5) if 0.16 <= mood < 0.22 else None
        events: list[tandem.TokenEvent] = []
        begin_s = time.monotonic()
        timeout_s = own_deadline_s or self.timeout_s
        history = History(name, router, begin_s, begin_s + timeout_s, own_deadline_s is not None)
        stream = client.stream(**self.catalogue.asks[name], timeout=timeout_s)
        try:
            async with asyncio.timeout(leave_at_s), aclosing(stream):
                await _read(stream, history, events, leave_after)
        except TimeoutError:
            history.ending = CANCELLED
        except tandem.TandemError as error:
            history.ending, history.error = type(error).__name__, str(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            history.ending = "CancelledError"  # nobody has cancelled: no kind of error a client should see
        history.ended_s = time.monotonic()
        history.faults = faults_of(history, events, self.catalogue.answers[name])
        self.histories.append(history)
        return history


async def _read(
    stream: AsyncGenerator[tandem.TokenEvent, None],
    history: History,
    events: list[tandem.TokenEvent],
    leave_after: int | None,
) -> None:
    async for event in stream:
        history.request_id = event.request_id
        history.token_times_s.append(time.monotonic())
        events.append(event)
        if leave_after is not None and len(events) > leave_after:
            history.ending = CANCELLED
            return
    history.ending = FINISHED
