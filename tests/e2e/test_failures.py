"""Kill workers under load: no stream may notice."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tandem
from tests.e2e.in_middle import mixed_requests, stream_and_hit
from tests.e2e.mesh_process import MeshProcess, mesh, pools_are_whole, wait_serving
from tests.e2e.reference import Reference

NUM_STREAMS = 8
NUM_TOKENS = 400


def requests() -> list[dict[str, Any]]:
    return mixed_requests(NUM_STREAMS, NUM_TOKENS)


async def undisturbed(client: tandem.AsyncClient) -> list[tandem.Result]:
    """What all requests get while nothing happens."""
    return await asyncio.gather(*(client.generate(**request) for request in requests()))


async def run_and_signal(
    running: MeshProcess, client: tandem.AsyncClient, number: signal.Signals
) -> list[list[tandem.TokenEvent]]:
    """All requests at once; when every stream has some tokens, one decode worker gets a signal."""
    events, pid = await stream_and_hit(client, requests(), lambda: running.signal("decode_worker", number))
    if number is signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    return events


def check_same(events: list[tandem.TokenEvent], expected: tandem.Result) -> None:
    """A stream that was hit equals one that was not: no gap, no duplicate, same text and log-probs."""
    assert [event.token.id for event in events] == [token.id for token in expected.tokens]
    assert "".join(event.text for event in events) == expected.text
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == expected.finish_reason == "length"
    for event, token in zip(events, expected.tokens, strict=True):
        assert event.token.logprob == pytest.approx(token.logprob, abs=1e-4)
    assert events[-1].usage.completion_tokens == NUM_TOKENS


FLAGS = ("--decode", "2", "--set", "prefill.max_batch_prefill_tokens=64")


async def test_lost_workers_are_not_noticed(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    async with (
        mesh(checkpoint("llama-tied"), tmp_path, *FLAGS) as running,
        tandem.AsyncClient(running.address) as client,
    ):
        # Drained, so that running sequences finish where they are; then killed.
        await check_lost_decode_workers(running, client, signal.SIGTERM, signal.SIGKILL)
        await wait_serving(client, "decode", at_least=2)
        await check_killed_prefill_worker(running, client, reference("llama-tied"))
        await check_frozen_prefill_worker(running, client, reference("llama-tied"))


@pytest.mark.soak
async def test_frozen_decode_worker_is_not_noticed(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Not dead: found out by its silence. In `make test` among all faults under load (tests/chaos)."""
    async with (
        mesh(checkpoint("llama-tied"), tmp_path, *FLAGS) as running,
        tandem.AsyncClient(running.address) as client,
    ):
        await check_lost_decode_workers(running, client, signal.SIGSTOP)


async def check_lost_decode_workers(running: MeshProcess, client: tandem.AsyncClient, *numbers: signal.Signals) -> None:
    expected = await undisturbed(client)
    for number in numbers:
        await wait_serving(client, "decode", at_least=2)
        hit = await run_and_signal(running, client, number)
        for events, result in zip(hit, expected, strict=True):
            check_same(events, result)
        await pools_are_whole(client)


@pytest.mark.soak
async def test_lost_decode_worker_is_not_noticed_while_tokens_are_guessed(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    model = checkpoint("llama-tied")
    async with (
        mesh(model, tmp_path, "--decode", "2", "--draft-model", str(model)) as running,
        tandem.AsyncClient(running.address) as client,
    ):
        expected = await undisturbed(client)
        hit = await run_and_signal(running, client, signal.SIGKILL)
        for events, result, request in zip(hit, expected, requests(), strict=True):
            check_same(events, result)
            if request["temperature"] == request["frequency_penalty"] == 0.0:
                reference("llama-tied").check_greedy(request["token_ids"], result.tokens)
        await pools_are_whole(client)
        assert any(worker.load.accepted_tokens for worker in await client.workers())


async def check_killed_prefill_worker(running: MeshProcess, client: tandem.AsyncClient, theirs: Reference) -> None:
    """Killed while prompts are on their way. Returns when its successor serves."""
    prompts = [[(11 * i + j) % 256 for j in range(330)] for i in range(16)]
    tasks = [asyncio.create_task(client.generate(token_ids=p, max_new_tokens=8, ignore_eos=True)) for p in prompts]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert not all(task.done() for task in tasks)
    killed = running.signal("prefill_worker", signal.SIGKILL)
    for prompt, result in zip(prompts, await asyncio.gather(*tasks), strict=True):
        assert len(result.tokens) == 8
        theirs.check_greedy(prompt, result.tokens)
    await pools_are_whole(client)
    await wait_serving(client, "prefill", killed)


async def check_frozen_prefill_worker(running: MeshProcess, client: tandem.AsyncClient, theirs: Reference) -> None:
    """Found out by its silence."""
    prompts = [[(13 * i + j) % 256 for j in range(100)] for i in range(4)]
    pid = running.signal("prefill_worker", signal.SIGSTOP)
    async with asyncio.timeout(60):  # found out by five seconds of silence, then prefilled by the decode worker
        results = await asyncio.gather(
            *(client.generate(token_ids=prompt, max_new_tokens=8, ignore_eos=True) for prompt in prompts)
        )
    os.kill(pid, signal.SIGCONT)
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.tokens) == 8
        theirs.check_greedy(prompt, result.tokens)
    await pools_are_whole(client)
