"""The client for code without an event loop."""

import asyncio
import copy
import gc
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import tandem
from tandem._routers import FORK_ADVICE
from tests.defects import Repaired
from tests.fakes.sdk_router import STORY, FakeRouter, Refusal, interrupt_main_thread


@pytest.fixture
def client(threaded_router: FakeRouter) -> Iterator[tandem.Client]:
    with tandem.Client(threaded_router.address, timeout=10) as opened:
        opened.wait_ready(10)
        yield opened


def wait_until(client: tandem.Client, happened: asyncio.Event) -> None:
    for _ in range(1000):
        if happened.is_set():
            return
        client.models()  # a round trip through the server's loop
    raise AssertionError("it did not happen")


def test_the_same_answers(client: tandem.Client) -> None:
    assert client.generate(prompt="", max_new_tokens=3).text == "One"
    assert "".join(event.text for event in client.stream(prompt="")) == STORY
    assert client.generate_until_done(prompt="", max_new_tokens=9).text == STORY
    assert len(client.tokenize(prompt="ab")) == 2
    assert client.tokenizer_config() == {"eos_token": "<end>"}
    assert [model.name for model in client.models()] == [client.model().name]
    assert client.mesh().workers == client.workers()


def test_the_same_errors(client: tandem.Client, threaded_router: FakeRouter) -> None:
    threaded_router.script.refusals = deque([Refusal(grpc.StatusCode.UNAUTHENTICATED, "no key")])
    with pytest.raises(tandem.Unauthenticated, match="no key"):
        client.generate(prompt="")


def test_leaving_a_stream_cancels_it(client: tandem.Client, threaded_router: FakeRouter) -> None:
    threaded_router.script.hold_after_messages = 2
    events = client.stream(prompt="")
    next(events)
    wait_until(client, threaded_router.script.holding)
    events.close()
    wait_until(client, threaded_router.script.cancelled)


@pytest.mark.parametrize("num_messages", [0, 1])
def test_an_interrupt_cancels_the_call(client: tandem.Client, threaded_router: FakeRouter, num_messages: int) -> None:
    script = threaded_router.script
    script.hold_after_messages = num_messages
    script.on_holding = interrupt_main_thread
    with pytest.raises(KeyboardInterrupt):
        list(client.stream(prompt=""))
    wait_until(client, threaded_router.script.cancelled)
    script.hold_after_messages = None
    assert client.generate(prompt="").text == STORY


def test_an_abandoned_stream_may_be_collected_on_any_thread(threaded_router: FakeRouter) -> None:
    """Also on the loop's own, which cannot wait for itself. If it did, closing the client would wait for ever, too."""
    client = tandem.Client(threaded_router.address, timeout=10)
    threaded_router.script.hold_after_messages = 2
    events = client.stream(prompt="")
    next(events)
    cycle: list[object] = [events]
    cycle.append(cycle)

    async def collect() -> None:
        gc.collect()

    gc.disable()
    try:
        del events, cycle
        collecting = asyncio.run_coroutine_threadsafe(collect(), client._background._loop)
        collecting.result(20)
    finally:
        gc.enable()
    wait_until(client, threaded_router.script.cancelled)
    client.close()


def test_a_client_that_nobody_holds_ends_its_thread(threaded_router: FakeRouter) -> None:
    client = tandem.Client(threaded_router.address, timeout=10)
    thread = client._background._thread
    caller = client.acting_for(None)
    del client
    gc.collect()
    events = caller.stream(prompt="")
    del caller
    gc.collect()
    assert "".join(event.text for event in events) == STORY
    del events
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_a_client_and_its_stream_may_be_dropped_together(client: tandem.Client, threaded_router: FakeRouter) -> None:
    dropped = tandem.Client(threaded_router.address, timeout=10)
    thread = dropped._background._thread
    threaded_router.script.hold_after_messages = 2
    events = dropped.stream(prompt="")
    next(events)
    del dropped, events
    gc.collect()
    wait_until(client, threaded_router.script.cancelled)
    thread.join(20)
    assert not thread.is_alive()


LEAVES_A_STREAM = """
import sys, tandem
client = tandem.Client(sys.argv[1])
events = client.stream(prompt="")
print(next(events).text)
"""


def test_a_program_ends_with_a_client_and_a_stream_left_open(threaded_router: FakeRouter) -> None:
    """The interpreter collects the stream when its threads do not run any more: nobody could end the call."""
    threaded_router.script.hold_after_messages = 2
    command = [sys.executable, "-W", "error", "-c", LEAVES_A_STREAM, threaded_router.address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("O\n", "")


def test_threads_share_a_client(client: tandem.Client) -> None:
    def work(number: int) -> str:
        return client.generate(prompt=f"{number}: ", echo=True).text

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(64))) == [f"{number}: {STORY}" for number in range(64)]


def test_a_closed_client_says_so(threaded_router: FakeRouter) -> None:
    client = tandem.Client(threaded_router.address)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.models()


def test_closing_shows_errors_and_ends_the_thread(threaded_router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> None:
        raise RuntimeError("unforeseen")

    client = tandem.Client(threaded_router.address)
    close = client._client.close
    monkeypatch.setattr(client._client, "close", broken)
    with pytest.raises(RuntimeError, match="unforeseen"):
        client.close()
    assert not client._background._thread.is_alive()
    asyncio.run(close())


@pytest.mark.parametrize("retry_after_ms", [None, "60000"], ids=["in a call", "between two tries"])
def test_closing_ends_what_other_threads_wait_for(threaded_router: FakeRouter, retry_after_ms: str | None) -> None:
    client = tandem.Client(threaded_router.address, timeout=120)
    client.wait_ready(10)
    script = threaded_router.script
    script.hold_after_messages = 1
    if retry_after_ms is not None:
        trailing = (("tandem-error", "Overloaded"), ("retry-after-ms", retry_after_ms))
        script.refusals = deque([Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", trailing)])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, prompt="")
        while not script.requests:
            client.models()
        client.close()
        with pytest.raises(tandem.Cancelled):
            waiting.result(timeout=20)


def test_one_client_in_several_runs_of_asyncio(threaded_router: FakeRouter) -> None:
    """As programs have it that make a client once, and call `asyncio.run` for each thing they do."""
    client = tandem.AsyncClient(threaded_router.address)

    async def first() -> None:
        async for _ in client.stream(prompt=""):
            break
        with pytest.raises(RuntimeError, match="in use in another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(client.models()))

    asyncio.run(first())
    assert asyncio.run(client.generate(prompt="")).text == STORY
    asyncio.run(client.close())


IN_A_FORK = """
import os, tandem
client = tandem.Client("127.0.0.1:1")
events = client.stream(prompt="")
child = os.fork()
if not child:
    for call in (client.models, lambda: next(events)):
        try:
            call()
        except RuntimeError as error:
            print(error, flush=True)
    client.close()
    del events
    os._exit(0)
os.waitpid(child, 0)
client.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_is_told_to_make_a_client_of_its_own() -> None:
    """It has no thread to run calls, and would wait for ever."""
    command = [sys.executable, "-W", "ignore", "-c", IN_A_FORK]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = "this client was made before the process forked: make one in each process; "
    assert ended.stdout.splitlines() == [said + FORK_ADVICE] * 2


IN_A_FORK_OF_A_CALLER = """
import asyncio, os, sys, tandem
async def ask(client):
    async with client:
        await client.models(timeout=2)
open_client = tandem.AsyncClient(sys.argv[1])
asyncio.run(ask(tandem.AsyncClient(sys.argv[1])))
child = os.fork()
if not child:
    with tandem.Client(sys.argv[1]) as mine:
        for call in (
            lambda: mine.models(timeout=2),
            lambda: asyncio.run(ask(tandem.AsyncClient(sys.argv[1]))),
            lambda: asyncio.run(ask(open_client)),
        ):
            try:
                call()
            except RuntimeError as error:
                print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
asyncio.run(ask(open_client))
"""
IN_A_FORK_BEFORE_ANY_CALL = """
import os, sys, tandem
child = os.fork()
with tandem.Client(sys.argv[1]) as client:
    os.write(1, client.model().name.encode() + b'\\n')  # print writes twice, and two processes do
if not child:
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_of_a_process_that_has_made_calls_is_told_so(threaded_router: FakeRouter, repaired: Repaired) -> None:
    """gRPC would hang there, whatever the timeout."""
    command = [sys.executable, "-W", "ignore", "-c", IN_A_FORK_OF_A_CALLER, threaded_router.address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = "this process was forked from one whose clients have made calls: "
    assert ended.stdout.splitlines() == [said + FORK_ADVICE] * 3
    repaired("D22", "raises RuntimeError at once, which says what to do")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_before_any_call_is_like_any_process(threaded_router: FakeRouter) -> None:
    command = [sys.executable, "-W", "ignore", "-c", IN_A_FORK_BEFORE_ANY_CALL, threaded_router.address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.splitlines() == ["fake"] * 2


def test_clients_are_copied_and_not_pickled(client: tandem.Client, threaded_router: FakeRouter) -> None:
    for kind in (client, tandem.AsyncClient(threaded_router.address)):
        with pytest.raises(TypeError, match=r"a client cannot be pickled.*: make one in each process"):
            pickle.dumps(kind)
    assert copy.copy(client).generate(prompt="", max_new_tokens=3).text == "One"
