"""Things done to a cluster apart from the fault mix, each with its own question. They return what they have seen."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import tandem
from tests.chaos.cluster import Cluster
from tests.chaos.watch import leased, replayed

_LONG = {"max_new_tokens": 250, "ignore_eos": True}
_AT_TOKEN = 10


@dataclass(frozen=True, slots=True)
class Killed:
    """The effects of a kill in the middle of streams. Gaps are the streams' longest waits between two tokens."""

    num_streams: int
    num_exact: int
    num_replayed: int
    gaps_s: list[float]
    failed_new: Counter[str]
    num_new: int


async def kill_mid_stream(cluster: Cluster, per_router: int, seed: int) -> Killed:
    """SIGKILL the busiest decode worker while all streams are in their middle; ask anew at once."""
    async with contextlib.AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(cluster.client(name, direct=True)) for name in cluster.routers}
        asks = [_long_ask(seed + number) for number in range(per_router * len(clients))]
        pairs = list(zip(asks, list(clients.values()) * per_router, strict=True))
        expected = await asyncio.gather(*(client.generate(**ask) for ask, client in pairs))
        middles = [asyncio.Event() for _ in pairs]
        streams = [
            asyncio.create_task(_follow(client, ask, middle))
            for (ask, client), middle in zip(pairs, middles, strict=True)
        ]
        await asyncio.gather(*(middle.wait() for middle in middles))
        workers = await clients[cluster.routers[0]].workers()
        num_before = len(replayed(cluster))
        decoding = [worker for worker in workers if worker.role == "decode"]
        cluster.kill(max(decoding, key=lambda worker: worker.load.num_running).worker_id)
        new = await asyncio.gather(*(_ask_anew(name, client) for name, client in clients.items()))
        seen = await asyncio.gather(*streams)
    num_replayed = len(replayed(cluster)) - num_before
    exact = sum(ids == [token.id for token in answer.tokens] for (ids, _), answer in zip(seen, expected, strict=True))
    failed = Counter(name for name, errors in new for error in errors if error)
    gaps_s, num_new = [gap_s for _, gap_s in seen], sum(len(errors) for _, errors in new)
    return Killed(len(pairs), exact, num_replayed, gaps_s, failed, num_new)


def _long_ask(seed: int) -> dict[str, Any]:
    """Greedy and seeded by turns."""
    prompt = [(7 * seed + step) % 256 for step in range(20 + 9 * (seed % 12))]
    return {"token_ids": prompt, "temperature": 0.8 if seed % 2 else 0.0, "seed": seed, **_LONG}


async def _follow(client: tandem.AsyncClient, ask: dict[str, Any], middle: asyncio.Event) -> tuple[list[int], float]:
    """Token ids, and the longest wait between two; what came before an error."""
    ids, times_s = list[int](), list[float]()
    with contextlib.suppress(tandem.TandemError):
        async for event in client.stream(**ask):
            ids.append(event.token.id if event.token else -1)
            times_s.append(time.monotonic())
            if len(ids) == _AT_TOKEN:
                middle.set()
    middle.set()
    gaps = (later - earlier for earlier, later in pairwise(times_s))
    return ids, max(gaps, default=0.0)


async def _ask_anew(router: str, client: tandem.AsyncClient) -> tuple[str, list[str]]:
    """New requests over some seconds; the names of their errors, "" for none."""
    errors = []
    for number in range(20):
        try:
            await client.generate(token_ids=[number, 1, 2, 3], max_new_tokens=4, ignore_eos=True, timeout=30)
            errors.append("")
        except tandem.TandemError as error:
            errors.append(type(error).__name__)
        await asyncio.sleep(0.1)
    return router, errors


@dataclass(frozen=True, slots=True)
class PrefillKilled:
    """The effects of a kill in the middle of transfers."""

    num_prompts: int
    num_exact: int
    num_replayed: int
    at_rest_s: float
    errors: Counter[str]


async def kill_mid_transfer(cluster: Cluster, count: int, seed: int) -> PrefillKilled:
    """SIGKILL a prefill worker while prompts, new to all caches, are computed and sent; afterwards ask the same."""
    prompts = [[(seed + 5 * number + step * (1 + number % 7)) % 256 for step in range(330)] for number in range(count)]
    async with cluster.client(cluster.routers[0], direct=True) as client:
        errors, first_token = Counter[str](), asyncio.Event()

        async def answer(prompt: list[int]) -> list[int]:
            tokens: list[int] = []
            try:
                async for event in client.stream(token_ids=prompt, max_new_tokens=8, ignore_eos=True):
                    tokens += [event.token.id] if event.token else []
                    first_token.set()
            except tandem.TandemError as error:
                errors[f"{type(error).__name__}: {error}"] += 1
                return []
            return tokens

        tasks = [asyncio.create_task(answer(prompt)) for prompt in prompts]
        await first_token.wait()  # one prompt is done; the others wait, are computed, or on their way
        num_replayed = len(replayed(cluster))
        cluster.kill(cluster.of_role("prefill")[seed % 2])
        hit = await asyncio.gather(*tasks)
        num_replayed = len(replayed(cluster)) - num_replayed
        began_s = time.monotonic()
        await cluster.wait_at_rest()
        at_rest_s = time.monotonic() - began_s
        clean = [await answer(prompt) for prompt in prompts]
    exact = sum(ours == theirs != [] for ours, theirs in zip(hit, clean, strict=True))
    return PrefillKilled(count, exact, num_replayed, at_rest_s, errors)


async def flood(cluster: Cluster, count: int, at_a_time: int = 64) -> Counter[str]:
    """Streams opened and left in all their phases, at all routers; how they ended."""
    rng, slots, endings = random.Random(count), asyncio.Semaphore(at_a_time), Counter[str]()
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(cluster.client(name, direct=True)) for name in cluster.routers]

        async def open_and_leave(number: int) -> None:
            async with slots:
                endings[await _open_and_leave(clients[number % len(clients)], number, rng.random())] += 1

        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(open_and_leave(number))
    return endings


async def _open_and_leave(client: tandem.AsyncClient, number: int, mood: float) -> str:
    """Leave at once, in the queue or in prefill, or in the middle of decoding."""
    prompt = [(number + step) % 256 for step in range(1 + number % 200)]
    stream = client.stream(token_ids=prompt, max_new_tokens=100, ignore_eos=True, timeout=30)
    try:
        async with asyncio.timeout(0.2 * mood if mood < 0.5 else None), contextlib.aclosing(stream):
            async for _ in stream:
                if mood >= 0.5:
                    return "left after a token"
    except TimeoutError:
        return "left while waiting"
    except tandem.TandemError as error:
        return type(error).__name__
    return "finished"


async def permits_return_s(cluster: Cluster, within_s: float = 60.0) -> float:
    """Seconds until no permit is leased any more. AssertionError if that takes too long."""
    began_s = time.monotonic()
    async with cluster.redis.client(timeout_s=0.5) as redis:
        while (count := await leased(redis)) != 0:
            assert time.monotonic() - began_s < within_s, f"{count} permits are leased after {within_s:g} s"
            await asyncio.sleep(0.05)
    return time.monotonic() - began_s


@dataclass(frozen=True, slots=True)
class Flipped:
    """Transfers whose bytes were flipped, and answers that differ from the undisturbed ones."""

    num_flips: int
    num_wrong: int
    num_answers: int


async def flip_transfers(cluster: Cluster, count: int) -> Flipped:
    """Long prompts, new to all caches, while bytes of their KV are flipped; then the same ones undisturbed."""
    prompts = [[(11 * number + 3 * step + step * step % 17) % 256 for step in range(300)] for number in range(count)]
    decodes = [cluster.proxies[name] for name in cluster.of_role("decode")]
    before = sum(proxy.num_flipped for proxy in decodes)
    async with cluster.client(cluster.routers[0], direct=True) as client:

        async def answer(prompt: list[int]) -> list[int]:
            result = await client.generate(token_ids=prompt, max_new_tokens=8, ignore_eos=True)
            return [token.id for token in result.tokens]

        hit = []
        for begin in range(0, count, 8):
            for proxy in decodes:
                proxy.conditions.flips = 1
            hit += await asyncio.gather(*map(answer, prompts[begin : begin + 8]))
        for proxy in decodes:
            proxy.heal()
        clean = await asyncio.gather(*map(answer, prompts[:8]))
        for begin in range(8, count, 8):
            clean += await asyncio.gather(*map(answer, prompts[begin : begin + 8]))
    wrong = sum(ours != theirs for ours, theirs in zip(hit, clean, strict=True))
    return Flipped(sum(proxy.num_flipped for proxy in decodes) - before, wrong, count)
