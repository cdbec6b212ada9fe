"""bench.scale: a mesh of modelled workers is measured, and what cannot come is named."""

import asyncio
import signal
import sys
from pathlib import Path

import psutil
import pytest

from bench.modelled_mesh import Child, MeshFailed, Shape
from bench.scale import measure, show
from tests.e2e.mesh_process import command_line, is_alive
from tests.waiting import until
from tests.warm import forks

__all__ = ["forks"]


async def test_a_mesh_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    rows = await measure(Shape(4, 1, has_redis=False, tokens_per_s=4.0), [3, 6], 1.0)
    assert [(row.num_workers, row.num_streams, row.num_failed) for row in rows] == [(4, 0, 0), (4, 3, 0), (4, 6, 0)]
    assert all(row.tokens_per_s > 0 and row.heartbeats_per_s > 0 and row.first_token_s > 0 for row in rows[1:])
    assert all(row.memory.routers > 0 and row.memory.clients > 0 and row.probes_s for row in rows)
    show([rows])
    assert "heartbeats" in capsys.readouterr().out


async def child_of(code: str, folder: Path) -> Child:
    log = folder / "log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code), stdout=asyncio.subprocess.PIPE, stderr=errors
        )
    return Child("worker", process, log)


async def test_a_process_that_ends_is_named(tmp_path: Path) -> None:
    child = await child_of("import sys; print('{\"event\": \"listening\"}', flush=True); sys.exit('no port')", tmp_path)
    await child.event("listening")
    for awaited in (child.event("ready"), child.next_totals()):
        with pytest.raises(MeshFailed, match="worker has ended\nno port"):
            await awaited
    await child.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_stopped_one_leaves_no_process(number: signal.Signals) -> None:
    flags = ("--workers", "4", "--streams", "2", "--seconds", "600", "--redis", "--routers", "2")
    bench = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.scale", *flags), stdout=asyncio.subprocess.DEVNULL
    )

    def names() -> str:
        return " ".join(" ".join(command_line(child)) for child in psutil.Process(bench.pid).children())

    await until(lambda: "bench.modelled_workers" in names())
    children = psutil.Process(bench.pid).children()
    assert any("redis-server" in " ".join(command_line(child)) for child in children)
    bench.send_signal(number)
    assert await bench.wait() == (-number if number is signal.SIGKILL else 128 + number)
    await until(lambda: not [child for child in children if is_alive(child)])
