"""A mesh of an older revision is upgraded, one service after the other, under load. `make upgrade FROM=REVISION`."""

import asyncio
import io
import os
import re
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import tandem
from mesh.domain.worker import PROTOCOL_VERSION
from tests.chaos.cluster import ROOT, Cluster, Shape, running
from tests.e2e.test_rolling_restart import NUM_CLIENTS, Load, restart
from tests.evidence import Evidence
from tests.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

REFUSED_S = 60.0
# Long enough that each restart hits some in their middle.
REQUESTS = [
    {
        "token_ids": [(13 * i + j) % 256 for j in range(8 + 31 * i)],
        "max_new_tokens": 150 + 10 * i,
        "temperature": 0.8 if i % 2 else 0.0,
        "seed": i,
        "ignore_eos": True,
    }
    for i in range(6)
]


def git(*arguments: str) -> bytes:
    return subprocess.run(("git", *arguments), cwd=ROOT, check=True, capture_output=True).stdout


def older_revision() -> str:
    """The revision to upgrade from: TANDEM_UPGRADE_FROM, the last release, or 50 commits ago."""
    if named := os.environ.get("TANDEM_UPGRADE_FROM"):
        return named
    releases = git("tag", "--list", "v*", "--sort=-version:refname", "--merged", "HEAD").decode().split()
    return releases[0] if releases else "HEAD~50"


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """The code of the older revision, without its history."""
    revision = older_revision()
    try:
        archive = git("archive", revision)
    except (OSError, subprocess.CalledProcessError):
        if "TANDEM_UPGRADE_FROM" in os.environ:
            raise
        pytest.skip(f"needs a clone that has {revision}")
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tmp_path / "older", filter="data")
    return tmp_path / "older"


def protocol_of(code: Path) -> int:
    found = re.search(r"^PROTOCOL_VERSION = (\d+)$", (code / "mesh/domain/worker.py").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


async def upgrade_all(cluster: Cluster, load: Load) -> None:
    """Workers first, then routers: so the oldest router meets the newest worker."""
    for name in (*cluster.of_role("decode"), *cluster.of_role("prefill"), *cluster.routers):
        await load.more(2 * NUM_CLIENTS)
        cluster.nodes[name].code = ROOT
        await restart(cluster, name)
        await cluster.wait_whole()
    await load.more(2 * NUM_CLIENTS)


async def be_refused(cluster: Cluster, load: Load) -> None:
    """A worker of another protocol is refused in words, and the mesh serves on without it."""
    cluster.nodes["decode-0"].code = ROOT
    await restart(cluster, "decode-0")
    words = f"speaks protocol {PROTOCOL_VERSION}"
    await until(lambda: words in cluster.log("decode-0"), REFUSED_S)
    await load.more(4 * NUM_CLIENTS)


async def test_each_service_is_upgraded_under_load(
    checkpoint: Callable[[str], Path], older: Path, tmp_path: Path, evidence: Evidence
) -> None:
    eager = dict.fromkeys(("prefill", "decode"), ("--enforce-eager",))  # no minutes for kernels that are used once
    shape = Shape(checkpoint("llama-tied"), tmp_path, num_prefill=1, num_decode=2, code=older, flags=eager)
    fits = protocol_of(older) == PROTOCOL_VERSION
    async with running(shape) as cluster:
        addresses = ",".join(f"127.0.0.1:{cluster.proxies[name].port}" for name in cluster.routers)
        async with tandem.AsyncClient(addresses, timeout=120) as client:
            load = Load(client, REQUESTS)
            await load.learn()
            clients = [asyncio.create_task(load.run(first)) for first in range(NUM_CLIENTS)]
            await (upgrade_all(cluster, load) if fits else be_refused(cluster, load))
            load.stop()
            await asyncio.gather(*clients)
    failed = f"{len(load.failures)} of {load.num_done}"
    what = "upgraded, one service after the other" if fits else "not upgraded: another protocol, refused in words"
    evidence("R10", f"requests that failed while {older_revision()} was {what}", failed, target="0",
             ok=not load.failures)  # fmt: skip
    assert load.failures == []
