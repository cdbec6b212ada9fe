"""A mesh in which the ranks of both workers dial in: KV is read from ranks while they compute, and written to ranks."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tandem
from tests.e2e.mesh_process import RESTART_S, mesh, pools_are_whole
from tests.e2e.reference import Reference
from tests.e2e.test_ranks import ask, long_prompts


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.timeout(600)
async def test_a_mesh_of_ranks_that_dial_in(
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TANDEM_MESH_KEY", "a key of these tests")
    model, asked = checkpoint("llama-tied"), long_prompts()
    small = {"max_batch_prefill_tokens": 64, "layers_per_group": 1, "layer_group_bytes": 0}  # many pieces of KV
    ports = {"prefill": free_port(), "decode": free_port()}
    sets = [
        flag
        for role, port in ports.items()
        for flag in ("--set", f"{role}.tensor_parallel=2", "--set", f"{role}.rank_listen=127.0.0.1:{port}")
    ]
    sets += [flag for name, value in small.items() for flag in ("--set", f"prefill.{name}={value}")]
    command = [sys.executable, "-m", "rank_worker", "--rank", "1", "--model", str(model), "--num-threads", "1"]
    ranks = [
        await asyncio.create_subprocess_exec(*command, "--leader", f"127.0.0.1:{port}", stdout=subprocess.DEVNULL)
        for port in ports.values()
    ]
    try:
        async with (
            mesh(model, tmp_path / "logs", *sets) as running,
            tandem.AsyncClient(running.address) as client,
        ):
            assert [worker.tensor_parallel for worker in await client.workers()] == [2, 2]
            answers = await ask(client, asked)
            await pools_are_whole(client)
        for request, tokens in zip(asked, answers, strict=True):
            reference("llama-tied").check_greedy(request["token_ids"], tokens)
        assert [await asyncio.wait_for(rank.wait(), RESTART_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
                await rank.wait()
