"""Several choices of one prompt: computed and sent once, then each on its own."""

import asyncio
from typing import Any

import pytest

from mesh.domain.errors import TransferCorrupt
from mesh.domain.tokens import SequenceFailure
from tandem.v1 import sampling_pb2
from tests.fakes.router_model import EOS_ID
from tests.fakes.router_workers import DecodeScript, PrefillScript, expected_tokens
from tests.service.conftest import Result, make_request

PROMPT = [65, 66, 67, 68, 69, 70]


def assert_all_there(result: Any, num_choices: int, count: int) -> None:
    for index in range(num_choices):
        assert result.ids(index) == expected_tokens(PROMPT, count)
        assert result.finish(index) == sampling_pb2.FINISH_REASON_LENGTH


async def test_a_fork_that_is_preempted_goes_on_by_itself(make_mesh: Any) -> None:
    mesh = await make_mesh()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    decode.scripts = [DecodeScript(), DecodeScript(fail_after=(3, SequenceFailure.PREEMPTED))]
    assert_all_there(await mesh.generate(token_ids=PROMPT, num_choices=3, max_new_tokens=8), 3, 8)
    first, replay = decode.started.items
    assert len(first.sequence.forks) == 2
    assert list(replay.sequence.token_ids) == [*PROMPT, *expected_tokens(PROMPT, 3)]
    assert replay.sequence.request_id in {fork.request_id for fork in first.sequence.forks}
    assert replay.sequence.sampling.seed == first.sequence.sampling.seed + 1
    assert len(prefill.calls.items) == 2
    mesh.assert_at_rest()


async def test_the_first_choice_may_fail_and_the_others_go_on(make_mesh: Any) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode()
    decode.scripts = [DecodeScript(fail_after=(2, SequenceFailure.INTERNAL))]
    assert_all_there(await mesh.generate(token_ids=PROMPT, num_choices=3, max_new_tokens=8), 3, 8)
    assert len(decode.started.items) == 2
    mesh.assert_at_rest()


@pytest.mark.parametrize("how", ["no room", "kv refused", "prefill failed"])
async def test_a_prompt_that_fails_is_tried_again_for_all(make_mesh: Any, how: str) -> None:
    mesh = await make_mesh()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    if how == "no room":
        decode.scripts = [DecodeScript(refuse=SequenceFailure.NO_CAPACITY)]
    elif how == "kv refused":
        prefill.scripts = [PrefillScript(fail_after_first=TransferCorrupt("scripted"))]
    else:
        prefill.scripts = [PrefillScript(fail_before_first=TransferCorrupt("scripted"))]
    assert_all_there(await mesh.generate(token_ids=PROMPT, num_choices=3, max_new_tokens=5), 3, 5)
    mesh.assert_at_rest()


async def test_a_lost_decode_worker_moves_all_choices(make_mesh: Any) -> None:
    mesh = await make_mesh()
    one, two = await mesh.decode("d1"), await mesh.decode("d2")
    for worker in (one, two):
        worker.gate.close()
    reading = asyncio.create_task(mesh.generate(token_ids=PROMPT, num_choices=3, max_new_tokens=6))
    await mesh.until(lambda: one.forked.items or two.forked.items)
    lost, other = (one, two) if one.forked.items else (two, one)
    other.gate.open()
    await lost.kill()
    assert_all_there(await reading, 3, 6)
    mesh.assert_at_rest()


async def test_a_replay_starts_no_more_forks_than_it_was_placed_with(make_mesh: Any) -> None:
    """The first choice queues before its siblings have come back, at a time when one sequence must fit."""
    mesh = await make_mesh()
    full = await mesh.decode("d1", max_num_seqs=4)
    full.gate.close()
    calls = [mesh.stub.Generate(make_request(token_ids=PROMPT, max_new_tokens=2), timeout=10) for _ in range(4)]
    await full.started.wait_len(4)
    lost = await mesh.decode("d2")
    lost.gate.close()
    reading = asyncio.create_task(mesh.generate(token_ids=PROMPT, num_choices=3, max_new_tokens=6))
    await mesh.until(lambda: lost.forked.items)
    await lost.kill()
    await mesh.until(lambda: mesh.router.journal.num_replays == 3 and mesh.model.queue.num_queued == 1)
    calls[0].cancel()
    await full.started.wait_len(5)
    assert not full.started.items[-1].sequence.forks
    for call in calls[1:]:
        call.cancel()
    full.gate.open()
    assert_all_there(await reading, 3, 6)
    mesh.assert_at_rest()


async def test_a_first_token_that_is_the_last_ends_one_choice_only(make_mesh: Any) -> None:
    """The first choice ends with the prompt; its KV is sent all the same, for the others."""
    mesh = await make_mesh()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    result = await mesh.generate(token_ids=PROMPT, num_choices=2, max_new_tokens=1)
    assert_all_there(result, 2, 1)
    ended = await mesh.generate(token_ids=PROMPT, num_choices=2, max_new_tokens=5, logit_bias={EOS_ID: 1.0})
    for index in range(2):
        assert ended.ids(index) == [EOS_ID]
        assert ended.finish(index) == sampling_pb2.FINISH_REASON_EOS_TOKEN
    assert (len(prefill.calls.items), len(decode.started.items), len(decode.forked.items)) == (2, 2, 2)
    mesh.assert_at_rest()


async def test_a_prompt_waits_until_there_is_room_for_all_choices(make_mesh: Any) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode(max_num_seqs=4)
    decode.gate.close()
    calls = [mesh.stub.Generate(make_request(token_ids=PROMPT, max_new_tokens=2), timeout=10) for _ in range(2)]
    await decode.started.wait_len(2)
    reading = asyncio.create_task(mesh.generate(token_ids=PROMPT, num_choices=3, max_new_tokens=4))
    await mesh.until(lambda: mesh.model.queue.num_queued == 1)
    calls[0].cancel()
    await decode.started.wait_len(3)
    assert len(decode.started.items[-1].sequence.forks) == 2
    decode.gate.open()
    assert_all_there(await reading, 3, 4)
    calls[1].cancel()
    more_than_seats = await mesh.generate(token_ids=PROMPT, num_choices=6, max_new_tokens=3)
    assert_all_there(more_than_seats, 6, 3)


async def test_cancelling_while_a_prompt_waits_leaves_nothing(make_mesh: Any) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode(max_num_seqs=1)
    decode.gate.close()
    running = mesh.stub.Generate(make_request(token_ids=PROMPT), timeout=10)
    await decode.started.wait_len(1)
    waiting = mesh.stub.Generate(make_request(token_ids=PROMPT, num_choices=3), timeout=10)
    await mesh.until(lambda: mesh.model.queue.num_queued == 1)
    waiting.cancel()
    running.cancel()
    await mesh.until(lambda: mesh.model.limiter.num_held == 0)
    await mesh.until(lambda: mesh.model.queue.num_queued == 0)
    mesh.assert_at_rest()


async def test_best_of_returns_the_best_with_the_facts_of_the_prompt(make_mesh: Any) -> None:
    mesh = await make_mesh()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    output = {"prompt_logprobs": True, "echo": True}
    request = make_request(token_ids=PROMPT, num_choices=2, max_new_tokens=6, best_of=4, output=output)
    result = Result()
    await result.read(mesh.stub.Generate(request, timeout=20))
    assert_all_there(result, 2, 6)
    assert {message.index for message in result.messages} == {0, 1}
    assert len(result.messages) == 2, "each as a whole"
    assert len(result.messages[0].prompt.tokens) == len(PROMPT)
    assert all(message.echo for message in result.messages)
    assert (len(prefill.calls.items), len(decode.forked.items)) == (1, 3)
    mesh.assert_at_rest()
