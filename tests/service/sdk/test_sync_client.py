"""The client for code without an event loop. The server runs on a loop of its own."""

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import tandem
from tests.fakes.sdk_router import STORY, FakeRouter, Refusal, Script


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> FakeRouter:
        running = FakeRouter(Script())
        await running.start()
        await running.set_serving(True)
        return running

    running = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield running
    asyncio.run_coroutine_threadsafe(running.stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def client(router: FakeRouter) -> Iterator[tandem.Client]:
    with tandem.Client(router.address, timeout=10) as opened:
        opened.wait_ready(10)
        yield opened


def test_the_same_answers(client: tandem.Client) -> None:
    assert client.generate(prompt="", max_new_tokens=3).text == "One"
    assert "".join(event.text for event in client.stream(prompt="")) == STORY
    assert client.generate_until_done(prompt="", max_new_tokens=9).text == STORY
    assert len(client.tokenize(prompt="ab")) == 2
    assert [model.name for model in client.models()] == [client.model().name]
    assert client.mesh().workers == client.workers()


def test_the_same_errors(client: tandem.Client, router: FakeRouter) -> None:
    router.script.refusals = deque([Refusal(grpc.StatusCode.UNAUTHENTICATED, "no key")])
    with pytest.raises(tandem.Unauthenticated, match="no key"):
        client.generate(prompt="")


def test_leaving_a_stream_cancels_it(client: tandem.Client, router: FakeRouter) -> None:
    router.script.hold_after_messages = 2
    events = client.stream(prompt="")
    next(events)
    events.close()
    for _ in range(100):
        if router.script.cancelled.is_set():
            break
        client.models()  # a round trip through the server's loop
    assert router.script.cancelled.is_set()


def test_threads_share_a_client(client: tandem.Client) -> None:
    def work(number: int) -> str:
        return client.generate(prompt=f"{number}: ", echo=True).text

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(64))) == [f"{number}: {STORY}" for number in range(64)]


def test_a_closed_client_says_so(router: FakeRouter) -> None:
    client = tandem.Client(router.address)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.models()
