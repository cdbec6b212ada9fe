"""Many streams at once, the cap, and clients that go away."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

import tandem
from tests.e2e.mesh_process import mesh, pools_are_whole
from tests.e2e.reference import Reference

CAP = 32
CAP_TOKENS = 500
"""Of the streams that fill the cap: they must outlast a wave of refusals."""


async def test_streams_join_and_leave_the_batch_and_the_cap_holds(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    async with (
        mesh(checkpoint("llama-tied"), tmp_path, "--max-concurrent-requests", str(CAP)) as running,
        tandem.AsyncClient(running.address, max_retries=0) as client,
    ):
        await check_joins_and_leaves(client, reference("llama-tied"))
        await pools_are_whole(client)
        await check_cap(client)
        await pools_are_whole(client)
        await check_leaving_clients(client)


async def check_joins_and_leaves(client: tandem.AsyncClient, theirs: Reference) -> None:
    """32 streams of different lengths, each started when others are under way; every one is what it would be alone."""
    prompts = [[(5 * i + 3 * j) % 256 for j in range(3 + 4 * i)] for i in range(CAP)]

    async def one(i: int) -> tandem.Result:
        await asyncio.sleep(0.02 * i)  # joins at different steps: the point of the test
        return await client.generate(token_ids=prompts[i], max_new_tokens=100 - 2 * i, ignore_eos=True)

    results = await asyncio.gather(*(one(i) for i in range(CAP)))
    for prompt, result in zip(prompts, results, strict=True):
        theirs.check_greedy(prompt, result.tokens)


async def check_cap(client: tandem.AsyncClient) -> None:
    """Past the cap: refused at once; streams in flight finish untouched."""
    streams = [
        asyncio.create_task(client.generate(token_ids=[i, 1], max_new_tokens=CAP_TOKENS, ignore_eos=True))
        for i in range(CAP)
    ]
    await asyncio.sleep(0.1)
    await asyncio.gather(*(is_refused(client) for _ in range(20)))
    assert not all(stream.done() for stream in streams), "a refusal waits for nobody"
    results = await asyncio.gather(*streams)
    assert all(len(result.tokens) == CAP_TOKENS for result in results)


async def is_refused(client: tandem.AsyncClient) -> None:
    """A request is refused as one too many."""
    with pytest.raises(tandem.Overloaded) as refused:
        await client.generate(token_ids=[1, 2], max_new_tokens=4)
    assert refused.value.retry_after_s > 0


async def check_leaving_clients(client: tandem.AsyncClient) -> None:
    """Clients that go away in the queue, in prefill and in decode free everything within a second."""
    tasks = [
        asyncio.create_task(client.generate(token_ids=[i] * 300, max_new_tokens=200, ignore_eos=True))
        for i in range(CAP)
    ]
    await asyncio.sleep(0.5)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await pools_are_whole(client, within_s=2.0)  # a second, and a heartbeat to tell us
    assert len((await client.generate(token_ids=[1, 2, 3], max_new_tokens=5, ignore_eos=True)).tokens) == 5


async def test_streams_that_do_not_fit_together_are_preempted_and_replayed_exactly(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    flags = ("--set", "decode.max_batch_total_tokens=640", "--max-total-tokens", "400")
    async with (
        mesh(checkpoint("llama-tied"), tmp_path, *flags) as running,
        tandem.AsyncClient(running.address) as client,
    ):
        prompts = [[(7 * i + j) % 256 for j in range(30 + i)] for i in range(8)]
        results = await asyncio.gather(
            *(client.generate(token_ids=p, max_new_tokens=200, ignore_eos=True) for p in prompts)
        )
        for prompt, result in zip(prompts, results, strict=True):
            assert len(result.tokens) == 200
            reference("llama-tied").check_greedy(prompt, result.tokens)
        await pools_are_whole(client)
    assert "SequencePreempted" in (tmp_path / "router.log").read_text()
