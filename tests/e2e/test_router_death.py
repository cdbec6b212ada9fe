"""Kill or stop the router under load: `tandem up` starts it again, the workers come back, and every stream goes on."""

import asyncio
import json
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

import tandem
from tests.defects import Repaired
from tests.e2e.in_middle import MAX_TRIES
from tests.e2e.mesh_process import RESTART_S, MeshProcess, mesh, pools_are_whole
from tests.e2e.test_failures import check_same, requests
from tests.fakes.redis_server import running_redis
from tests.waiting import until, until_told

NUM_HTTP = 4
NUM_HTTP_TOKENS = 400
IN_MIDDLE = 10
LIMIT_S = 90
SHAPES: list[dict[str, Any]] = [
    {"token_ids": list(range(40)), "max_new_tokens": NUM_HTTP_TOKENS, "ignore_eos": True, "temperature": 0.9, **more}
    for more in ({"n": 3, "seed": 5}, {"n": 2, "best_of": 3, "seed": 6}, {})
]
"""Several choices, choices that are ranked at the end, and one whose seed is nobody's choice."""
FLAGS = ("--http-port", "0", "--name", "m", "--set", "gateway.ping_interval_s=1")


class Watched:
    """When a stream's tokens came. `in_middle` is set once there are some."""

    def __init__(self) -> None:
        self.in_middle = asyncio.Event()
        self.longest_gap_s = 0.0
        self._num_tokens = 0
        self._last_s = time.monotonic()

    def token(self) -> None:
        now_s = time.monotonic()
        if self._num_tokens:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self._last_s)
        self._last_s = now_s
        self._num_tokens += 1
        if self._num_tokens == IN_MIDDLE:
            self.in_middle.set()


async def follow(client: tandem.AsyncClient, request: Mapping[str, Any], watched: Watched) -> list[tandem.TokenEvent]:
    events = []
    async for event in client.stream(**request):  # type: ignore[arg-type]
        events.append(event)
        watched.token()
    return events


def completion(number: int) -> dict[str, object]:
    return {
        "model": "m",
        "prompt": "Once upon a time " * (number + 1),
        "max_tokens": NUM_HTTP_TOKENS,
        "ignore_eos": True,
        "temperature": 0.7 if number % 2 else 0.0,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def follow_http(base: str, number: int, watched: Watched) -> tuple[str, int]:
    """The text and how many tokens the server counted."""
    text, num_tokens, has_ended = "", 0, False
    async with (
        httpx2.AsyncClient(base_url=base, timeout=LIMIT_S) as client,
        client.stream("POST", "/v1/completions", json=completion(number)) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            has_ended = line == "data: [DONE]"
            if has_ended:
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            text += "".join(choice["text"] for choice in chunk["choices"])
            num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
            watched.token()
    assert has_ended
    return text, num_tokens


async def is_back(client: tandem.AsyncClient) -> None:
    """Return once router, prefill and decode workers serve again."""
    await client.wait_ready(LIMIT_S)
    async with asyncio.timeout(LIMIT_S):
        while sorted(worker.role for worker in await client.workers() if worker.serving) != ["decode", "prefill"]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def run_all(
    running: MeshProcess, client: tandem.AsyncClient, in_middle: Callable[[], object] = lambda: None
) -> tuple[list[Any], list[Any], float]:
    """Run all requests at once and call `in_middle` when no stream is at its beginning or its end. Return the events of
    gRPC, the texts of HTTP and the longest gap between two tokens.

    On a busy machine one stream may end before another begins; then `in_middle` waits for another try.
    """
    for _ in range(MAX_TRIES):
        grpc_watched, http_watched = [Watched() for _ in requests()], [Watched() for _ in range(NUM_HTTP)]
        http = [asyncio.create_task(follow_http(running.http, i, watched)) for i, watched in enumerate(http_watched)]
        streams = [
            asyncio.create_task(follow(client, request, watched))
            for request, watched in zip(requests(), grpc_watched, strict=True)
        ]
        watched = [*grpc_watched, *http_watched]
        shapes = [asyncio.create_task(client.generate(**request)) for request in SHAPES]
        await asyncio.gather(*(stream.in_middle.wait() for stream in watched))
        was_in_middle = not any(task.done() for task in (*streams, *http, *shapes))
        if was_in_middle:
            in_middle()
        events, texts = await asyncio.gather(*streams), await asyncio.gather(*http)
        *seeded, drawn = await asyncio.gather(*shapes)
        if was_in_middle:
            break
    else:
        pytest.fail(f"in {MAX_TRIES} tries a stream ended before all had begun")
    assert len(drawn.tokens) == NUM_HTTP_TOKENS
    texts += [[(choice.index, choice.text, choice.finish_reason) for choice in result.choices] for result in seeded]
    return events, texts, max(stream.longest_gap_s for stream in watched)


async def check_kill(running: MeshProcess, number: signal.Signals = signal.SIGKILL) -> tuple[int, int, float]:
    """Send the router that all streams are on a signal that ends it. Returns how many streams of gRPC and HTTP there
    were, all token-exact, and the longest gap between two tokens.
    """
    async with tandem.AsyncClient(running.address, timeout=LIMIT_S) as client:
        old = running.pids("router")
        workers = {(worker.worker_id, worker.pid) for worker in await client.workers()}
        calm, calm_texts, _ = await run_all(running, client)
        hit, texts, gap_s = await run_all(running, client, lambda: running.signal("router", number))
        for events, expected in zip(hit, calm, strict=True):
            check_same(events, result_of(expected))
            assert len({event.request_id for event in events}) == 1
        assert texts == calm_texts
        http = texts[:NUM_HTTP]
        assert [num_tokens for _, num_tokens in http] == [NUM_HTTP_TOKENS] * NUM_HTTP
    for address in running.address.split(","):
        async with tandem.AsyncClient(address, timeout=LIMIT_S) as client:
            await is_back(client)
            assert {(worker.worker_id, worker.pid) for worker in await client.workers()} == workers, (
                "the workers lived on"
            )
            await pools_are_whole(client)
    assert old[0] not in running.pids("router")
    assert len(running.pids("router")) == len(old)
    return len(hit) + len(SHAPES), NUM_HTTP, gap_s


async def test_a_killed_router_is_noticed_as_a_pause(
    checkpoint: Callable[[str], Path], tmp_path: Path, repaired: Repaired
) -> None:
    async with mesh(checkpoint("llama-tied"), tmp_path, *FLAGS) as running:
        num_grpc, num_http, gap_s = await check_kill(running)
    repaired(
        "F3",
        f"the router is started again where it was; {num_grpc} of {num_grpc} gRPC and {num_http} of {num_http} HTTP "
        f"streams token-exact, longest gap {gap_s:.1f} s",
    )


async def test_streams_that_outlast_a_stopped_router_go_on(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    async with mesh(checkpoint("llama-tied"), tmp_path, *FLAGS, "--set", "router.grace_s=0.01") as running:
        await check_kill(running, signal.SIGTERM)


async def test_requests_that_wait_in_the_queue_of_a_router_that_is_stopped_twice(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    limits = ("decode.max_rolling_batch_size=2", "router.max_queued_requests=50", "router.grace_s=0.01")
    flags = [word for limit in limits for word in ("--set", limit)]
    async with (
        mesh(checkpoint("llama-tied"), tmp_path, *flags) as running,
        tandem.AsyncClient(running.address, resume_timeout=RESTART_S) as client,
    ):

        def ask_all() -> list[asyncio.Task[tandem.Result]]:
            shape: dict[str, Any] = {"max_new_tokens": NUM_HTTP_TOKENS, "ignore_eos": True, "temperature": 0.9}
            prompts = [list(range(seed, seed + 20)) for seed in range(12)]
            requests = [client.generate(token_ids=ids, seed=seed, **shape) for seed, ids in enumerate(prompts)]
            return [asyncio.create_task(request) for request in requests]

        calm = await asyncio.gather(*ask_all())
        calls = ask_all()

        def most_wait(told: tandem.Mesh) -> bool:
            are_all_here = told.active_requests + sum(call.done() for call in calls) == len(calls)
            return are_all_here and told.queued_requests >= len(calls) / 2

        for _ in range(2):
            await until_told(client.mesh, most_wait)
            stopped = running.signal("router", signal.SIGTERM)
            await until(lambda stopped=stopped: running.pids("router") not in ([], [stopped]), RESTART_S)
            await client.wait_ready(RESTART_S)
        for answer, expected in zip(await asyncio.gather(*calls), calm, strict=True):
            assert answer.text == expected.text
            assert [token.id for token in answer.tokens] == [token.id for token in expected.tokens]
        await pools_are_whole(client)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_one_of_two_ended_routers_streams_go_on_at_the_other(
    checkpoint: Callable[[str], Path], tmp_path: Path, number: signal.Signals, repaired: Repaired
) -> None:
    async with running_redis() as redis:
        flags = (*FLAGS, "--routers", "2", "--registry-url", redis.url, "--set", "router.grace_s=0.01")
        async with mesh(checkpoint("llama-tied"), tmp_path, *flags) as running:
            num_grpc, num_http, gap_s = await check_kill(running, number)
    repaired(
        "F3",
        f"one of two routers: {num_grpc} of {num_grpc} gRPC and {num_http} of {num_http} HTTP streams token-exact at "
        f"the other, longest gap {gap_s:.1f} s",
    )


def result_of(events: list[tandem.TokenEvent]) -> tandem.Result:
    """The answer that these events make."""
    last = events[-1]
    assert last.finish_reason is not None
    assert last.usage is not None
    tokens = tuple(event.token for event in events if event.token is not None)
    choice = tandem.Choice(0, "".join(event.text for event in events), tokens, last.finish_reason, last.usage)
    return tandem.Result(last.request_id, (choice,))
