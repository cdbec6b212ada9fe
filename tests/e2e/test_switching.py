"""Workers of a real `tandem up` change their roles while streams run, by the command; and are killed while they do."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tandem
from tests.e2e.mesh_process import RESTART_S, mesh
from tests.waiting import until_told
from tests.warm import warm_processes

STREAMS: list[dict[str, Any]] = [
    {"prompt": f"{number} is a number that", "max_new_tokens": 500 + 20 * number, "ignore_eos": True, "seed": number}
    for number in range(4)
]
"""They last for several times as long as `tandem switch` takes to start, and a call beside them."""
SHORTER = [stream | {"max_new_tokens": 300 + 20 * number} for number, stream in enumerate(STREAMS)]
"""They last for longer than a call."""


async def answers(
    client: tandem.AsyncClient, begun: asyncio.Event, streams: Sequence[dict[str, Any]] = STREAMS
) -> list[list[int]]:
    """All streams at once; `begun` is set once each has some tokens."""
    lengths = [0] * len(streams)

    async def read(index: int) -> list[int]:
        ids = []
        async for event in client.stream(**streams[index], temperature=0.8):
            ids.append(event.token.id)
            lengths[index] += 1
            if min(lengths) >= 5:
                begun.set()
        return ids

    return await asyncio.gather(*(read(index) for index in range(len(streams))))


async def switch(address: str, worker: str, role: str, *flags: str) -> tuple[int, str]:
    """Run `tandem switch`; returns its status and what it says."""
    command = [sys.executable, "-m", "tandem_cli", "switch", worker, role, "--address", address, *flags]
    with warm_processes():
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, err = await process.communicate()
    return process.returncode or 0, err.decode()


async def worker(client: tandem.AsyncClient, worker_id: str) -> tandem.Worker:
    return next(each for each in await client.workers() if each.worker_id == worker_id)


async def test_roles_change_and_change_back_while_streams_run_also_when_a_worker_is_killed(tmp_path: Path) -> None:
    flags = ("--prefill", "2", "--decode", "2", "--switchable")
    async with mesh("tandem-small", tmp_path, *flags) as up, tandem.AsyncClient(up.address) as client:
        undisturbed = await answers(client, asyncio.Event())
        pids = {each.worker_id: each.pid for each in await client.workers()}
        begun = asyncio.Event()
        streams = asyncio.create_task(answers(client, begun))
        await begun.wait()
        assert await switch(up.address, "decode-1", "prefill") == (0, "")
        assert await streams == undisturbed
        now = await worker(client, "decode-1")
        assert (now.pid, now.role, now.serving) == (pids["decode-1"], "prefill", True)
        for name in ("decode-1", "prefill-0"):
            begun = asyncio.Event()
            streams = asyncio.create_task(answers(client, begun, SHORTER))
            await begun.wait()
            await client.switch_role(name, "decode")
            beginnings = [ids[: stream["max_new_tokens"]] for ids, stream in zip(undisturbed, SHORTER, strict=True)]
            assert await streams == beginnings
            now = await until_told(partial(worker, client, name), lambda now: now.role == "decode" and now.serving)
            assert now.pid == pids[name]
        status, said = await switch(up.address, "prefill-1", "decode")
        assert (status, "prefill-1 is the last prefill worker that serves" in said) == (1, True)
        assert (await switch(up.address, "decode-7", "decode"))[1] == "tandem: there is no worker 'decode-7'\n"
        await check_killed_while_it_changes(client, undisturbed)


async def check_killed_while_it_changes(client: tandem.AsyncClient, undisturbed: list[list[int]]) -> None:
    """The worker is started again in its first role. Its streams may move at once: then the change is over before one
    can look, and is tried again.
    """
    for _ in range(20):
        begun = asyncio.Event()
        streams = asyncio.create_task(answers(client, begun))
        await begun.wait()
        pid = (await worker(client, "decode-1")).pid
        await client.switch_role("decode-1", "prefill")  # the command takes longer to start and to end
        now = await until_told(
            lambda: worker(client, "decode-1"), lambda now: now.state == "draining" or now.role == "prefill"
        )
        if now.state == "draining":
            break
        await client.switch_role("decode-1", "decode")
        assert await streams == undisturbed
        await until_told(lambda: worker(client, "decode-1"), lambda now: now.role == "decode" and now.serving)
    else:
        raise AssertionError("20 changes were over before one could look")
    assert not streams.done()
    os.kill(pid, signal.SIGKILL)
    assert await streams == undisturbed
    again = await until_told(
        lambda: worker(client, "decode-1"), lambda now: now.serving and now.pid != pid, within_s=RESTART_S
    )
    assert again.role == "decode"
