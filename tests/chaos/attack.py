"""Runs the attackers of `attackers.py`, and looks at the services of a mesh from outside."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.cluster import ROOT
from tests.e2e.mesh_process import MeshProcess


@dataclass
class Attack:
    """An attacker's process; `end` tells it to stop holding its connections."""

    process: asyncio.subprocess.Process

    async def end(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        result: dict[str, Any] = json.loads(await self.process.stdout.readline())
        return result


@asynccontextmanager
async def attack(kind: str, *targets: str) -> AsyncIterator[Attack]:
    """Start one; it is killed at the end. The kinds that hold connections hold them all when the block begins."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.chaos.attackers", kind, *targets),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        if kind in ("idle", "unread", "watchers"):
            assert process.stdout is not None
            assert await process.stdout.readline() == b"held\n"
        yield Attack(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def service(running: MeshProcess, module: str) -> psutil.Process:
    """The first process of a service, such as "gateway"."""
    return psutil.Process(running.pids(module)[0])


def rss_mib(running: MeshProcess, module: str) -> float:
    """Resident memory of the process now."""
    return float(service(running, module).memory_info().rss) / (1 << 20)


def unsent_bytes(running: MeshProcess) -> list[int]:
    """Bytes that the system still holds for each of the gateway's connections whose client reads nothing, closed
    ones included.
    """
    port = int(running.http.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    queues = [int(row[4].partition(":")[0], 16) for row in rows if int(row[1].partition(":")[2], 16) == port]
    return [queue for queue in queues if queue]


def listening(running: MeshProcess) -> set[int]:
    """Ports at which the services listen, the gateway's aside."""
    http = int(running.http.rpartition(":")[2])
    ports = {
        connection.laddr.port
        for child in running.children()
        for connection in child.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    return ports - {http}
