"""A decode worker that guesses ahead, over real gRPC: the same tokens, whatever happens in between."""

import asyncio
from itertools import chain

import pytest

from kvtransfer import TransferSettings
from mesh.v1 import decode_pb2
from tests.fakes.drafters import FakeDrafter, eager_speculator
from tests.fakes.requests import make_request
from tests.fakes.runner import VOCAB, fake_continuation
from tests.service.fake_router import FakeRouter, fake_router
from tests.service.worker_rig import EngineRig, worker_rig


def guessing(mistakes: float = 0.3, **changes: int) -> EngineRig:
    """Guesses with mistakes, so that sequences get one to five tokens a step."""
    drafter = FakeDrafter(lambda sequence, length: fake_continuation(sequence.token_ids, length), mistakes, VOCAB)
    return EngineRig.make(speculator=eager_speculator(drafter, 4), **changes)


async def collect_steps(router: FakeRouter, request_id: str) -> list[list[int]]:
    """Tokens of each step until the end."""
    steps: list[list[int]] = []
    while True:
        output = (await router.box(request_id).get()).step.outputs[0]
        steps.append([token.id for token in output.tokens])
        if output.finish_reason:
            return steps


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_tokens_through_both_workers(transport: str) -> None:
    settings = TransferSettings(transports=(transport,))
    async with worker_rig(decode=guessing(), settings=settings) as rig, fake_router(rig) as router:
        prompts = [[5] * (i % 11) + list(range(i, i + 9)) for i in range(1, 9)]
        requests = [make_request(f"r{i}", prompt, max_new_tokens=20 + i) for i, prompt in enumerate(prompts)]
        results = await asyncio.gather(*(router.run(request) for request in requests))
        assert results == [fake_continuation(prompt, 20 + i) for i, prompt in enumerate(prompts)]
        await rig.wait_whole()
        load = rig.decode.scheduler.load()
        assert 0 < load.accepted_tokens < load.drafted_tokens
        assert rig.prefill.scheduler.load().drafted_tokens == 0


async def test_steps_carry_several_tokens_and_end_at_a_stop_token_between_guesses() -> None:
    async with worker_rig(decode=guessing(mistakes=0.0)) as rig, fake_router(rig) as router:
        expected = fake_continuation([1, 2], 12)
        await router.start(make_request("a", [1, 2], max_new_tokens=20, sampling={"stop_token_ids": (expected[7],)}))
        steps = await collect_steps(router, "a")
        assert [*chain.from_iterable(steps)] == expected[:8]
        assert max(map(len, steps)) == 5
        assert len(steps[-1]) < 5  # a guess behind the stop token was right, and is dropped


async def test_replay_abort_and_drain_between_guesses() -> None:
    async with worker_rig(decode=guessing()) as rig, fake_router(rig) as router:
        prompt = [9, 8, 7, 6, 5]
        expected = fake_continuation(prompt, 30)
        replay = make_request("a", prompt + expected[:7], attempt=1, num_prompt_tokens=5, max_new_tokens=30)
        assert await router.run(replay) == expected[7:]
        await router.start(aborted := make_request("b", prompt, max_new_tokens=150))
        await router.box("b").get()
        await router.abort(aborted)
        await router.start(last := make_request("c", prompt, max_new_tokens=30))
        first = (await router.box("c").get()).step.outputs[0].tokens
        rig.draining.set()
        assert [token.id for token in first] + await router.collect(last) == expected
        await asyncio.wait_for(rig.decode_service.drained(), 60)
        await rig.wait_whole()


async def test_guesses_take_no_blocks_from_others_and_preemption_still_works() -> None:
    async with worker_rig(decode=guessing(num_blocks=8)) as rig, fake_router(rig) as router:
        rig.begin_together(2)
        await router.start(make_request("old", range(1, 8), max_new_tokens=24))
        await router.start(make_request("young", range(30, 41), max_new_tokens=20))
        assert (await router.failure("young")).reason == decode_pb2.SEQUENCE_FAILURE_PREEMPTED
        steps = await collect_steps(router, "old")
        assert [*chain.from_iterable(steps)] == fake_continuation(range(1, 8), 24)
        await rig.wait_whole()
