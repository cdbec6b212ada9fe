"""The asynchronous client against a real gRPC server."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import grpc
import numpy as np
import pytest

import tandem
from tandem._retries import RetryPolicy
from tandem.v1 import mesh_pb2
from tests.defects import Repaired
from tests.fakes.sdk_router import STORY, FakeRouter, Refusal, Script, running_router

OVERLOADED = Refusal(
    grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("tandem-error", "Overloaded"), ("retry-after-ms", "10"))
)
NO_WORKERS = Refusal(grpc.StatusCode.UNAVAILABLE, "nobody", (("tandem-error", "NoWorkers"),))


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    async with running_router() as running:
        yield running


@pytest.fixture
async def client(router: FakeRouter) -> AsyncIterator[tandem.AsyncClient]:
    async with tandem.AsyncClient(router.address, timeout=10, api_key="secret") as opened:
        yield opened


async def test_an_answer_has_text_tokens_and_counts(client: tandem.AsyncClient, router: FakeRouter) -> None:
    result = await client.generate(prompt="Go: ", max_new_tokens=3, top_logprobs=2, prompt_logprobs=True, echo=True)
    assert result.text == "Go: One"
    assert [token.text for token in result.tokens] == ["O", "n", "e"]
    assert [top.text for top in result.tokens[0].top] == ["A", "B"]
    assert [token.logprob for token in result.prompt_tokens] == [None, -1.0, -1.0, -1.0]
    assert (result.finish_reason, result.request_id) == ("length", "request-1")
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (4, 3)
    assert result.confidence == pytest.approx(0.6065, abs=1e-4)
    assert router.script.metadata[0]["authorization"] == "Bearer secret"


async def test_one_event_per_token_however_they_travel(client: tandem.AsyncClient, router: FakeRouter) -> None:
    router.script.tokens_per_message = 5
    events = [event async for event in client.stream(prompt="", max_new_tokens=12)]
    assert "".join(event.text for event in events) == STORY[:12]
    assert [event.finish_reason for event in events] == [None] * 11 + ["length"]
    assert events[-1].usage is not None


async def test_choices_come_interleaved_and_are_sorted_out(client: tandem.AsyncClient) -> None:
    result = await client.generate(prompt="", max_new_tokens=4, n=3)
    assert [(choice.index, choice.text) for choice in result.choices] == [(0, "One "), (1, "One "), (2, "One ")]


@pytest.mark.parametrize("refusal", [OVERLOADED, NO_WORKERS, Refusal(grpc.StatusCode.UNAVAILABLE)])
async def test_a_refused_call_is_tried_again(client: tandem.AsyncClient, router: FakeRouter, refusal: Refusal) -> None:
    router.script.refusals = deque([refusal, refusal])
    assert (await client.generate(prompt="")).text == STORY
    assert len(router.script.requests) == 3


async def test_trying_again_has_an_end(client: tandem.AsyncClient, router: FakeRouter) -> None:
    router.script.refusals = deque([OVERLOADED] * 9)
    with pytest.raises(tandem.Overloaded, match="full") as caught:
        await client.generate(prompt="")
    assert caught.value.retry_after_s == 0.01
    assert len(router.script.requests) == 1 + RetryPolicy().max_retries


async def test_no_try_again_past_the_deadline(client: tandem.AsyncClient, router: FakeRouter) -> None:
    late = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("retry-after-ms", "60000"),))
    router.script.refusals = deque([late])
    with pytest.raises(tandem.Overloaded):
        await client.generate(prompt="", timeout=5)
    assert len(router.script.requests) == 1


async def test_a_request_at_fault_is_not_sent_again(client: tandem.AsyncClient, router: FakeRouter) -> None:
    router.script.refusals = deque([Refusal(grpc.StatusCode.INVALID_ARGUMENT, "top_p must be in (0, 1]")])
    with pytest.raises(tandem.InvalidRequest, match="top_p"):
        await client.generate(prompt="", top_p=3)
    assert len(router.script.requests) == 1


async def test_what_a_router_refuses_once_tokens_have_come_is_not_sent_again(
    client: tandem.AsyncClient, router: FakeRouter
) -> None:
    router.script.refusals = deque([replace(NO_WORKERS, after_messages=2)])
    events = client.stream(prompt="")
    assert [(await anext(events)).text, (await anext(events)).text] == ["O", "n"]
    with pytest.raises(tandem.NoWorkers, match="nobody"):
        await anext(events)
    assert len(router.script.requests) == 1


async def test_a_stream_that_just_ends_is_an_error(client: tandem.AsyncClient, router: FakeRouter) -> None:
    router.script.omit_finish = True
    with pytest.raises(tandem.InternalError, match="without a finish reason"):
        await client.generate(prompt="")


async def test_the_deadline_ends_a_silent_stream(client: tandem.AsyncClient, router: FakeRouter) -> None:
    router.script.hold_after_messages = 1
    with pytest.raises(tandem.DeadlineExceeded):
        await client.generate(prompt="", timeout=0.3)
    await asyncio.wait_for(router.script.cancelled.wait(), 60)


async def test_closing_the_iterator_cancels_on_the_server(client: tandem.AsyncClient, router: FakeRouter) -> None:
    router.script.hold_after_messages = 2
    async with aclosing(client.stream(prompt="")) as events:
        await anext(events)
        await asyncio.wait_for(router.script.holding.wait(), 60)
    await asyncio.wait_for(router.script.cancelled.wait(), 60)


async def test_leaving_the_loop_cancels_on_the_server(client: tandem.AsyncClient, router: FakeRouter) -> None:
    router.script.hold_after_messages = 2
    async for _ in client.stream(prompt=""):
        await asyncio.wait_for(router.script.holding.wait(), 60)
        break
    await asyncio.wait_for(router.script.cancelled.wait(), 60)


@pytest.mark.parametrize("num_messages", [0, 1])
async def test_cancelling_the_task_cancels_on_the_server(
    client: tandem.AsyncClient, router: FakeRouter, num_messages: int
) -> None:
    router.script.hold_after_messages = num_messages
    task = asyncio.create_task(client.generate(prompt=""))
    await asyncio.wait_for(router.script.holding.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(router.script.cancelled.wait(), 60)


async def test_rounds_with_a_seed_draw_differently_and_repeatably(
    client: tandem.AsyncClient, router: FakeRouter
) -> None:
    await client.generate_until_done(prompt="", max_new_tokens=16, seed=2**64 - 1)
    assert [request.sampling.seed for request in router.script.requests] == [2**64 - 1, 15, 31]
    router.script.requests.clear()
    await client.generate_until_done(prompt="", max_new_tokens=16)
    assert not any(request.sampling.HasField("seed") for request in router.script.requests)


async def test_rounds_join_into_one_text(client: tandem.AsyncClient, router: FakeRouter) -> None:
    # The story's 17th byte is the first half of its "ä": the cut character is made anew in the next round.
    result = await client.generate_until_done(prompt="Go: ", max_new_tokens=17, min_new_tokens=20, echo=True)
    assert result.text == "Go: " + STORY
    assert result.finish_reason == "eos_token"
    assert bytes(token.id for token in result.tokens[:-1]).decode() == STORY
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (4, len(result.tokens))
    sent = router.script.requests
    assert all(request.HasField("token_ids") for request in sent)
    assert [request.output.echo for request in sent] == [True, False, False]
    assert [request.sampling.min_new_tokens for request in sent] == [17, 4, 0]  # no round may need more than it gets


async def test_the_least_tokens_of_an_answer_fit_the_most(client: tandem.AsyncClient, router: FakeRouter) -> None:
    with pytest.raises(tandem.InvalidRequest, match=r"min_new_tokens \(14\) must be <= max_total \(13\)"):
        await client.generate_until_done(prompt="Go: ", max_new_tokens=5, min_new_tokens=14, max_total=13)
    assert not router.script.requests


@pytest.mark.parametrize(
    ("bounds", "num_tokens"),
    [({"max_rounds": 2}, 20), ({"max_total": 13}, 13), ({"max_rounds": 1}, 10)],
)
async def test_rounds_have_bounds(client: tandem.AsyncClient, bounds: dict[str, int], num_tokens: int) -> None:
    result = await client.generate_until_done(token_ids=[1], max_new_tokens=10, **bounds)  # type: ignore[arg-type]
    assert (len(result.tokens), result.finish_reason) == (num_tokens, "length")


async def test_rounds_end_where_the_model_ends(client: tandem.AsyncClient, router: FakeRouter) -> None:
    router.script.max_total_tokens = 12
    result = await client.generate_until_done(messages=[{"role": "user", "content": ""}], max_new_tokens=5)
    assert (len(result.tokens), result.finish_reason) == (5, "length")


@pytest.mark.parametrize("bounds", [{"max_new_tokens": 5}, {"max_new_tokens": 50}, {"max_total": 50}])
async def test_the_last_round_gets_what_is_left_of_the_context(
    client: tandem.AsyncClient, router: FakeRouter, bounds: dict[str, int]
) -> None:
    router.script.max_total_tokens, router.script.enforces_total = 12, True
    result = await client.generate_until_done(prompt="Go ", **bounds)  # type: ignore[arg-type]
    assert (result.text, result.finish_reason) == (STORY[:9], "length")


async def test_only_one_choice_can_be_continued(client: tandem.AsyncClient) -> None:
    with pytest.raises(tandem.InvalidRequest, match="n and best_of must be 1"):
        await client.generate_until_done(prompt="", n=2)
    with pytest.raises(tandem.InvalidRequest, match="n and best_of must be 1"):
        await client.generate_until_done(prompt="", best_of=2)


async def test_the_first_round_of_a_conversation_sends_its_messages(
    client: tandem.AsyncClient, router: FakeRouter
) -> None:
    messages = [{"role": "user", "content": "Tell me"}]
    result = await client.generate_until_done(messages=messages, max_new_tokens=17, truncate_prompt_tokens=8)
    assert result.text == STORY
    first, second, _ = router.script.requests
    assert (first.chat.messages[0].content, first.sampling.truncate_prompt_tokens) == ("Tell me", 8)
    assert bytes(second.token_ids.ids).decode() == "Tell me\n" + STORY[:16]


async def test_the_end_of_a_prompt_has_a_length(client: tandem.AsyncClient) -> None:
    with pytest.raises(tandem.InvalidRequest, match="truncate_prompt_tokens must be at least 1, got -1"):
        await client.generate_until_done(prompt="abc", truncate_prompt_tokens=-1)


@pytest.mark.parametrize(
    "structure", [{"json_object": True}, {"json_schema": {}}, {"choice": ["yes", "no"]}, {"regex": "a+"}]
)
async def test_a_structure_cannot_be_continued(client: tandem.AsyncClient, structure: dict[str, Any]) -> None:
    with pytest.raises(tandem.InvalidRequest, match=f"begins anew with each round: {next(iter(structure))}"):
        await client.generate_until_done(prompt="", max_new_tokens=2, **structure)
    assert (await client.generate_until_done(prompt="", max_new_tokens=2, max_rounds=1, json_object=None)).tokens


@pytest.mark.parametrize("timeout_s", [1e10, math.inf])
async def test_a_timeout_may_be_as_long_as_one_likes(client: tandem.AsyncClient, timeout_s: float) -> None:
    await asyncio.wait_for(client.wait_ready(timeout=timeout_s), 60)
    assert (await client.generate(prompt="", timeout=timeout_s)).text == STORY
    assert await client.models(timeout=timeout_s)


@pytest.mark.parametrize("timeout", [np.float32(60), Decimal(60), Fraction(60)])
async def test_a_timeout_may_be_any_kind_of_number(client: tandem.AsyncClient, timeout: Any) -> None:
    """Numbers of 32 bits cannot tell points in time that are a minute apart."""
    assert (await client.generate(prompt="", timeout=timeout)).text == STORY
    await client.wait_ready(timeout)


async def test_a_timeout_that_is_no_number_is_refused(client: tandem.AsyncClient) -> None:
    for timeout in (math.nan, "soon", [], -(10**400)):
        with pytest.raises(tandem.InvalidRequest, match=r"^timeout must be a number of seconds, got"):
            await client.generate(prompt="", timeout=timeout)  # type: ignore[arg-type]
        with pytest.raises(tandem.InvalidRequest, match=r"^timeout must be a number of seconds, got"):
            await client.wait_ready(timeout)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"address": 5}, "address must be a text like"),
        ({"api_key": 5}, "api_key must be a text, got a value of type int"),
        ({"api_key": b"key"}, "api_key must be a text, got a value of type bytes"),
        ({"timeout": None}, "timeout must be a number of seconds, got None"),
        ({"resume_timeout": "x"}, "resume_timeout must be a number of seconds, got 'x'"),
        ({"max_retries": "x"}, "max_retries must be an integer, got 'x'"),
        ({"tls": "ca.pem"}, "tls must be true, false or a Tls object, got 'ca.pem'"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(tandem.InvalidRequest, match=f"^{said}"):
        tandem.AsyncClient(**options)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prompt": "", "max_rounds": None}, "max_rounds must be an integer, got None"),
        ({"prompt": "", "max_total": "x"}, "max_total must be an integer, got 'x'"),
        ({"token_ids": 5}, "token_ids must be a list, got 5"),
        ({"prompt": "", "seed": "x"}, "seed must be an integer"),
        ({"prompt": "", "truncate_prompt_tokens": "x"}, "truncate_prompt_tokens must be an integer"),
    ],
)
async def test_a_wrong_argument_of_several_rounds_is_named(
    client: tandem.AsyncClient, router: FakeRouter, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(tandem.InvalidRequest, match=f"^{said}"):
        await client.generate_until_done(**arguments)
    assert router.script.requests == []


async def test_iterators_last_for_all_rounds(client: tandem.AsyncClient, router: FakeRouter) -> None:
    turns = ({"role": "user", "content": text} for text in ("Tell me", "a story"))
    await client.generate_until_done(messages=turns, stop=iter(["never"]), max_new_tokens=17)
    first, *others = router.script.requests
    assert [turn.content for turn in first.chat.messages] == ["Tell me", "a story"]
    assert others
    assert all(list(request.sampling.stop) == ["never"] for request in (first, *others))


async def test_models_tokens_and_workers(client: tandem.AsyncClient) -> None:
    assert [token.id for token in await client.tokenize(prompt="ab")] == [97, 98]
    assert await client.tokenizer_config() == {"eos_token": "<end>"}
    assert [model.name for model in await client.models()] == ["fake"]
    assert (await client.model()).max_total_tokens == 1000
    with pytest.raises(tandem.ModelNotFound, match="other"):
        await client.model("other")
    workers = await client.workers()
    assert [(worker.role, worker.state) for worker in workers] == [("prefill", "ready"), ("decode", "ready")]
    assert [worker.degrees for worker in workers] == ["1x1", "2x3"]
    assert workers[0].last_seen_s == 0.25
    mesh = await client.mesh()
    assert mesh.queued_requests == 1
    assert mesh.advice == (tandem.Advice("add", "decode", "KV is full", "fake"),)
    (point,) = await client.history(600)
    assert (point.length_s, point.generated_tokens, point.gap_p50_s, point.kv_used) == (600, 50, 0.02, None)


async def test_workers_are_drained(client: tandem.AsyncClient, router: FakeRouter) -> None:
    await client.drain("decode-0")
    await client.undrain("decode-0")
    assert router.mesh.drained == [("decode-0", True), ("decode-0", False)]


async def test_workers_change_their_roles(client: tandem.AsyncClient, router: FakeRouter) -> None:
    await client.switch_role("decode-0", "prefill")
    await client.switch_role("prefill-0", "decode")
    assert router.mesh.switched == [
        ("decode-0", mesh_pb2.WORKER_ROLE_PREFILL),
        ("prefill-0", mesh_pb2.WORKER_ROLE_DECODE),
    ]
    with pytest.raises(tandem.InvalidRequest, match="role must be prefill or decode, got 'router'"):
        await client.switch_role("decode-0", "router")


async def test_traffic_is_shared_out(client: tandem.AsyncClient, router: FakeRouter) -> None:
    assert (await client.mesh()).traffic == {}
    await client.set_traffic("chat", {"v1": 90, "v2": 10})
    assert (await client.mesh()).traffic == router.mesh.traffic == {"chat": {"v1": 90, "v2": 10}}


async def test_one_connection_serves_many_callers(router: FakeRouter) -> None:
    async with tandem.AsyncClient(router.address, api_key="own") as client:
        for caller in (client.acting_for("alice"), client.acting_for(None), client):
            await caller.generate(prompt="One", max_new_tokens=1)
        assert await client.acting_for("bob").render(messages=[{"role": "user", "content": "hi"}]) == "user: hi\n"
    sent = [metadata.get("authorization") for metadata in router.script.metadata]
    assert sent == ["Bearer alice", None, "Bearer own"]


@pytest.mark.parametrize("key", ["key\n", "clé", "a\0b"])
async def test_a_key_that_no_header_can_carry_is_refused(router: FakeRouter, key: str) -> None:
    with pytest.raises(tandem.InvalidRequest, match="api_key"):
        tandem.AsyncClient(router.address, api_key=key)
    async with tandem.AsyncClient(router.address) as client:
        with pytest.raises(tandem.InvalidRequest, match="api_key"):
            client.acting_for(key)


async def test_nobody_there() -> None:
    async with tandem.AsyncClient("127.0.0.1:1", max_retries=0) as client:
        with pytest.raises(tandem.ConnectionFailed, match=r"127\.0\.0\.1:1"):
            await client.models()
        with pytest.raises(tandem.DeadlineExceeded, match="not ready"):
            await client.wait_ready(timeout=0.2)


async def test_waiting_for_a_server_that_gets_ready(router: FakeRouter, client: tandem.AsyncClient) -> None:
    await router.set_serving(False)
    waiting = asyncio.create_task(client.wait_ready(timeout=10))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.1)
    await router.set_serving(True)
    await waiting


async def test_a_closed_client_says_so(router: FakeRouter) -> None:
    client = tandem.AsyncClient(router.address)
    await client.close()
    await client.close()
    with pytest.raises(RuntimeError, match="closed"):
        await client.models()


async def test_closing_fails_the_task_group_of_a_call(router: FakeRouter, repaired: Repaired) -> None:
    router.script.hold_after_messages = 1
    client = tandem.AsyncClient(router.address, timeout=10)

    async def ask_and_close() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(client.generate(prompt=""))
            await asyncio.wait_for(router.script.holding.wait(), 60)
            await client.close()

    with pytest.raises(ExceptionGroup) as caught:
        await ask_and_close()
    assert [str(error) for error in caught.value.exceptions] == ["the client was closed"]
    assert caught.group_contains(tandem.Cancelled)
    assert len(router.script.requests) == 1
    repaired("D28", "raises Cancelled, as documented")


async def test_a_task_that_its_caller_cancels_is_cancelled(client: tandem.AsyncClient, router: FakeRouter) -> None:
    router.script.hold_after_messages = 1
    call = asyncio.create_task(client.generate(prompt=""))
    await asyncio.wait_for(router.script.holding.wait(), 60)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_the_channel_is_the_callers_to_make(router: FakeRouter) -> None:
    opened = []

    def open_channel(address: str) -> grpc.aio.Channel:
        opened.append(address)
        return grpc.aio.insecure_channel(router.address)

    async with tandem.AsyncClient("somewhere:1", open_channel=open_channel) as client:
        await client.models()
    assert opened == ["somewhere:1"]


async def test_script_defaults_are_not_shared() -> None:
    assert Script().refusals is not Script().refusals
