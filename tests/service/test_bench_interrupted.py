"""Ctrl-C or SIGTERM in a benchmark: the runs that have ended are shown and saved. A killed one leaves no mesh."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.defects import Repaired
from tests.e2e.mesh_process import command_line, is_alive
from tests.fakes.openai_server import OpenAIScript, running_openai_server
from tests.processes import running_process
from tests.waiting import until

_ROUNDS = 60
_LIMIT_S = 120.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_rounds_that_ended_are_shown(number: signal.Signals, tmp_path: Path, repaired: Repaired) -> None:
    file = tmp_path / "results.json"
    flags = ["--model", "m", "--concurrency", "1", "--num-requests", "2", "--repeats", str(_ROUNDS)]
    async with (
        running_openai_server(OpenAIScript()) as url,
        running_process(
            *(sys.executable, "-m", "tandem_cli", "bench", "--openai", f"{url}/v1", *flags, "--json", str(file)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        ) as process,
    ):
        assert process.stderr is not None
        async with asyncio.timeout(_LIMIT_S):
            while b"4 of 60" not in (line := await process.stderr.readline()):
                assert line, "it ended by itself"
            process.send_signal(number)
            out, _ = await process.communicate()
    assert process.returncode == 128 + number
    (point,) = json.loads(file.read_text())["points"]
    assert 3 <= len(point["runs"]) < _ROUNDS
    text = out.decode()
    assert "interrupted: only the runs that were complete by then are shown" in text
    assert "tokens/s" in text
    repaired("F14", f"a bench stopped after 3 of {_ROUNDS} rounds shows and saves them")


async def test_a_killed_bench_leaves_no_mesh() -> None:
    async with running_process(
        *(sys.executable, "-m", "tandem_cli", "bench", "--up=--decode 1", "--num-requests=100000"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    ) as process:

        def running() -> list[psutil.Process]:
            try:
                return psutil.Process(process.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                return []

        await until(lambda: any("decode_worker" in " ".join(command_line(child)) for child in running()))
        mesh = running()
        process.kill()
    await until(lambda: not [child for child in mesh if is_alive(child)])
