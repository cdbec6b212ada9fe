"""Calls whose router dies go on at the next router, or at the same address: nobody can tell from their events."""

import asyncio
import dataclasses
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace

import grpc
import pytest

import tandem
from tandem import _connection, _retries
from tandem._retries import Deadline
from tandem._routers import Router
from tests.defects import Repaired
from tests.fakes.resetting_proxy import resetting_proxy
from tests.fakes.sdk_router import STORY, FakeRouter, Refusal, Script, running_router
from tests.waiting import until

BROKE = Refusal(grpc.StatusCode.UNAVAILABLE, "Socket closed")
STOPPING = Refusal(grpc.StatusCode.UNAVAILABLE, "this router is stopping", (("tandem-error", "RouterStopping"),))
NO_WORKERS = Refusal(grpc.StatusCode.UNAVAILABLE, "this router is stopping", (("tandem-error", "NoWorkers"),))
OVERLOADED = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("tandem-error", "Overloaded"),))
EVERYTHING = {"prompt": "Go: ", "n": 3, "top_logprobs": 2, "prompt_logprobs": True, "echo": True}
LIMIT_S = 60


def breaks_after(*num_messages: int) -> deque[Refusal]:
    """Of the calls that come, the first break after so many messages each."""
    return deque(dataclasses.replace(BROKE, after_messages=number) for number in num_messages)


@asynccontextmanager
async def client_of(*routers: FakeRouter, **options: float) -> AsyncIterator[tandem.AsyncClient]:
    addresses = ",".join(router.address for router in routers)
    async with tandem.AsyncClient(addresses, timeout=LIMIT_S, **options) as client:  # type: ignore[arg-type]
        yield client


async def events_of(client: tandem.AsyncClient, **arguments: object) -> list[tandem.TokenEvent]:
    return [event async for event in client.stream(**arguments)]  # type: ignore[arg-type]


def of_choices(events: Iterable[tandem.TokenEvent]) -> dict[int, list[tandem.TokenEvent]]:
    """Sorted out: in which order choices take turns is left to the router."""
    sorted_out: dict[int, list[tandem.TokenEvent]] = {}
    for event in events:
        sorted_out.setdefault(event.index, []).append(event)
    return sorted_out


@pytest.mark.parametrize("tokens_per_message", [1, 4])
@pytest.mark.parametrize("num_messages", [0, 1, 2, 3, 7, 10, 23])
async def test_events_are_those_of_a_call_that_nothing_happened_to(num_messages: int, tokens_per_message: int) -> None:
    async with running_router() as first, running_router() as second:
        async with client_of(second) as client:
            expected = await events_of(client, **EVERYTHING)
        first.script.refusals = breaks_after(num_messages)
        second.script.tokens_per_message = tokens_per_message
        async with client_of(first, second) as client:
            events = await events_of(client, **EVERYTHING)
        assert len(first.script.requests) == 1
    assert [event.prompt_tokens for event in events] == [event.prompt_tokens for event in expected]
    assert of_choices(events) == of_choices(expected)


@pytest.mark.parametrize("num_messages", [0, 1, 12])
@pytest.mark.parametrize("end", [STOPPING, Refusal(grpc.StatusCode.CANCELLED, "the server is stopping")])
async def test_answers_that_outlast_a_stopping_router_go_on(num_messages: int, end: Refusal) -> None:
    async with running_router() as first, running_router() as second:
        first.script.refusals = deque([dataclasses.replace(end, after_messages=num_messages)])
        async with client_of(first, second, max_retries=0) as client:
            events = await events_of(client, prompt="")
        assert [len(router.script.requests) for router in (first, second)] == [1, 1]
    assert "".join(event.text for event in events) == STORY


@pytest.mark.parametrize("end", [STOPPING, BROKE], ids=["stopping", "broken"])
@pytest.mark.parametrize("refusal", [NO_WORKERS, OVERLOADED], ids=["no workers", "overloaded"])
async def test_routers_that_refuse_a_call_which_was_cut_off_before_its_first_token(
    end: Refusal, refusal: Refusal
) -> None:
    async with running_router() as router:
        router.script.refusals = deque([end, *[refusal] * 4])
        async with client_of(router) as client:
            assert (await client.generate(prompt="")).text == STORY
        assert len(router.script.requests) == 6


async def test_what_kept_a_lost_call_from_going_on_is_the_cause_of_its_error() -> None:
    async with running_router() as router:
        router.script.refusals = deque([*breaks_after(3), *[NO_WORKERS] * 1000])
        async with client_of(router, resume_timeout=1.0) as client:
            with pytest.raises(tandem.ConnectionFailed, match="Socket closed") as told:
                await client.generate(prompt="")
        assert len(router.script.requests) > 3, "it was refused in several rounds"
    causes: list[BaseException] = []
    error: BaseException | None = told.value
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__
    assert error is None, "an error is its own cause"
    assert [type(cause) for cause in causes] == [tandem.ConnectionFailed, tandem.NoWorkers, grpc.aio.AioRpcError]
    assert len(traceback.extract_tb(causes[1].__traceback__)) < 12, "it grew with each round"


async def test_a_router_that_is_started_again_at_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncExitStack() as stack:
        old = FakeRouter(Script(hold_after_messages=3))
        await old.start()
        await old.set_serving(True)
        client = await stack.enter_async_context(client_of(old, max_retries=0))
        call = asyncio.create_task(client.generate(prompt="", temperature=0.5))
        waiting = asyncio.create_task(client.generate(prompt="One", max_new_tokens=1))
        await asyncio.wait_for(old.script.holding.wait(), LIMIT_S)
        await old.stop()
        new = FakeRouter(Script())
        await new.start(int(old.address.rpartition(":")[2]))  # not serving yet: it knows no workers
        stack.push_async_callback(new.stop)
        assert not call.done()
        await new.set_serving(True)
        assert (await call).text == STORY
        assert (await waiting).text == " "
        seeds = {request.sampling.seed for request in (*old.script.requests, *new.script.requests)}
    assert len(seeds - {0}) == 1, "the draws of the first call would be others"


async def test_the_time_to_find_a_router_begins_with_each_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    passed_s = 0.0
    monkeypatch.setattr(_retries, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s))
    async with AsyncExitStack() as stack:
        scripts = (Script(hold_after_messages=0), Script(hold_after_messages=0), Script())
        routers = [FakeRouter(script) for script in scripts]
        await routers[0].start()
        await routers[0].set_serving(True)
        client = await stack.enter_async_context(
            tandem.AsyncClient(routers[0].address, timeout=10 * LIMIT_S, max_retries=0, resume_timeout=LIMIT_S)
        )
        call = asyncio.create_task(client.generate(prompt=""))
        for old, new in pairwise(routers):
            await asyncio.wait_for(old.script.holding.wait(), LIMIT_S)
            passed_s += 2 * LIMIT_S  # the call waits in the router's queue meanwhile
            await old.stop()
            await new.start(int(old.address.rpartition(":")[2]))
            stack.push_async_callback(new.stop)
            await new.set_serving(True)
        assert (await call).text == STORY


@pytest.mark.parametrize("code", [0, 2, 5, 7, 8])
async def test_a_stream_that_a_proxy_resets_goes_on(code: int, repaired: Repaired) -> None:
    async with (
        running_router(Script(hold_after_messages=3)) as router,
        resetting_proxy(router.address) as proxy,
        tandem.AsyncClient(proxy.address, timeout=LIMIT_S) as client,
    ):
        events = client.stream(prompt="")
        shown = [(await anext(events)).text for _ in range(3)]
        await asyncio.wait_for(router.script.holding.wait(), LIMIT_S)
        router.script.hold_after_messages = None
        proxy.reset(code)
        shown += [event.text async for event in events]
        assert "".join(shown) == STORY
        assert len(router.script.requests) == 2
    repaired("D26", "resumed, whatever the code of the reset")


async def test_draws_are_repeatable_whoever_chooses_the_seed() -> None:
    async with running_router() as router, client_of(router) as client:
        for arguments in ({"temperature": 1.0}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 7}, {"top_k": 3}):
            await client.generate(prompt="", **arguments)  # type: ignore[arg-type]
        first, second, given, greedy = (request.sampling for request in router.script.requests)
    assert first.HasField("seed")
    assert second.HasField("seed")
    assert first.seed != second.seed
    assert given.seed == 7
    assert not greedy.HasField("seed")


@pytest.mark.parametrize(
    ("story", "shown"), [("One fine night.", "the answer was different"), ("One", "the answer was different")]
)
async def test_another_answer_is_not_passed_off_as_this_one(story: str, shown: str) -> None:
    async with running_router() as first, running_router(Script(story=story)) as second:
        first.script.refusals = breaks_after(12)
        async with client_of(first, second) as client:
            events = client.stream(prompt="")
            assert "".join([(await anext(events)).text for _ in range(12)]) == STORY[:12]
            with pytest.raises(tandem.ConnectionFailed, match=shown):
                await anext(events)


async def test_a_loss_behind_the_whole_answer_is_none() -> None:
    async with running_router() as router:
        num_messages = 3 * (len(STORY.encode()) + 1)
        router.script.refusals = breaks_after(num_messages)
        async with client_of(router, resume_timeout=0) as client:
            result = await client.generate(prompt="", n=3)
        assert [choice.text for choice in result.choices] == [STORY] * 3
        assert len(router.script.requests) == 1


async def test_resuming_can_be_turned_off() -> None:
    async with running_router() as first, running_router() as second:
        first.script.refusals = breaks_after(2)
        async with client_of(first, second, resume_timeout=0) as client:
            with pytest.raises(tandem.ConnectionFailed, match="Socket closed"):
                await client.generate(prompt="")
        assert second.script.requests == []


async def test_a_call_that_breaks_every_router_is_given_up() -> None:
    async with running_router() as router:
        router.script.refusals = breaks_after(*range(1, 20))
        async with client_of(router) as client:
            with pytest.raises(tandem.ConnectionFailed, match="Socket closed"):
                await client.generate(prompt="")
        assert len(router.script.requests) == 5


async def test_routers_that_stop_one_after_the_other_are_not_the_calls_fault() -> None:
    async with running_router() as router:
        router.script.refusals = deque(dataclasses.replace(STOPPING, after_messages=n) for n in range(1, 9))
        async with client_of(router) as client:
            assert (await client.generate(prompt="")).text == STORY
        assert len(router.script.requests) == 9


@pytest.mark.parametrize("hangs", [True, False], ids=["in a check", "between two checks"])
async def test_a_client_that_is_closed_while_its_stream_looks_for_a_router(
    monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    is_serving, checked = _connection._is_serving, asyncio.Event()

    async def check(router: Router, deadline: Deadline) -> bool:
        serving = await is_serving(router, deadline)
        checked.set()
        return serving

    monkeypatch.setattr(_connection, "_is_serving", check)
    async with running_router() as router:
        router.script.refusals = breaks_after(2)
        await router.set_serving(False)
        router.health.hangs = hangs
        client = tandem.AsyncClient(router.address, timeout=LIMIT_S)
        call = asyncio.create_task(client.generate(prompt=""))
        await asyncio.wait_for((router.health.asked if hangs else checked).wait(), LIMIT_S)
        await client.close()
        with pytest.raises(tandem.Cancelled, match="the client was closed"):
            await call


async def test_a_client_that_is_closed_while_a_call_waits_to_be_sent_again() -> None:
    async with running_router() as router:
        router.script.refusals = deque([Refusal(grpc.StatusCode.UNAVAILABLE)] * 100)
        client = tandem.AsyncClient(router.address, timeout=LIMIT_S, max_retries=90)
        call = asyncio.create_task(client.generate(prompt=""))
        await until(lambda: len(router.script.requests) > 1)
        await client.close()
        with pytest.raises(tandem.Cancelled, match="the client was closed"):
            await call
        with pytest.raises(RuntimeError, match="closed"):  # a mistake: it has not begun before
            await client.generate(prompt="")


async def test_a_call_that_breaks_every_router_before_its_first_token_is_given_up() -> None:
    async with running_router() as first, running_router() as second, running_router() as third:
        routers = (first, second, third)
        for router in routers:
            router.script.refusals = breaks_after(*[0] * 20)
        async with client_of(*routers) as client:
            with pytest.raises(tandem.ConnectionFailed, match="Socket closed"):
                await client.generate(prompt="")
        assert sum(len(router.script.requests) for router in routers) == 5


async def test_a_refusal_of_the_second_router_is_told_as_the_loss_it_follows() -> None:
    async with running_router() as first, running_router() as second:
        first.script.refusals = breaks_after(2)
        second.script.refusals = deque([Refusal(grpc.StatusCode.NOT_FOUND, "other model")])
        async with client_of(first, second) as client:
            with pytest.raises(tandem.ConnectionFailed, match="Socket closed"):
                await client.generate(prompt="")


@pytest.mark.parametrize("limits", [{"timeout": 1.0}, {}])
async def test_looking_for_a_router_has_an_end(limits: dict[str, float]) -> None:
    async with running_router() as router:
        router.script.refusals = breaks_after(2)
        async with client_of(router, resume_timeout=LIMIT_S if limits else 0.5) as client:
            events = client.stream(prompt="", **limits)  # type: ignore[arg-type]
            await anext(events)
            await router.set_serving(False)
            assert (await anext(events)).text == "n"
            with pytest.raises(tandem.DeadlineExceeded if limits else tandem.ConnectionFailed):
                await anext(events)
        assert len(router.script.requests) == 1


async def test_a_first_token_that_has_come_cannot_come_too_late() -> None:
    async with running_router() as first, running_router() as second:
        first.script.refusals = breaks_after(2)
        async with client_of(first, second) as client:
            await client.generate(prompt="", ttft_target=0.25)
        (request,) = second.script.requests
    assert request.ttft_target.ToTimedelta().total_seconds() > LIMIT_S / 2


def test_the_client_without_an_event_loop(threaded_router: FakeRouter) -> None:
    threaded_router.script.refusals = breaks_after(5)
    with tandem.Client(threaded_router.address, timeout=LIMIT_S) as client:
        assert client.generate(prompt="").text == STORY
    with tandem.Client(threaded_router.address, timeout=LIMIT_S, resume_timeout=0) as client:
        threaded_router.script.refusals = breaks_after(5)
        with pytest.raises(tandem.ConnectionFailed):
            client.generate(prompt="")
