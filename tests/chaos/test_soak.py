"""A long run of a small cluster: `make soak`; a minute and a half of it in `make chaos`.

TANDEM_SOAK_S        seconds (default 90; slopes count from 600 on)
TANDEM_SOAK_SAMPLES  file of the samples (default: a temporary one)
"""

import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos import figures, samples
from tests.chaos.cluster import Cluster, Shape, running
from tests.chaos.load import Catalogue, Load
from tests.chaos.soak import TIMEOUT_S, Soak
from tests.evidence import Evidence

SOAK_S = float(os.environ.get("TANDEM_SOAK_S", "90"))
SAMPLES = os.environ.get("TANDEM_SOAK_SAMPLES", "")
FAULT_EVERY_S = min(60.0, SOAK_S / 12)
THINK_S = 1.0
CLIENTS_PER_ROUTER = 3
HTTP_CLIENTS = 2

pytestmark = [
    pytest.mark.soak,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1800 + SOAK_S),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """Two of each worker and router, a gateway, Redis."""
    if sys.platform != "linux":
        pytest.skip("proxies listen on 127.0.0.2, which only Linux has from the start")
    shape = Shape(
        checkpoint("llama-tied"),
        tmp_path_factory.mktemp("logs"),
        num_decode=2,
        num_gateways=1,
        flags={"decode-1": ("--prefix-caching=false", "--kv-transports=grpc")},
    )
    async with running(shape) as started:
        yield started


async def test_nothing_grows(cluster: Cluster, catalogue: Catalogue, evidence: Evidence, tmp_path: Path) -> None:
    path = Path(SAMPLES) if SAMPLES else tmp_path / "soak.jsonl"
    load = Load(cluster, catalogue, think_s=THINK_S, timeout_s=TIMEOUT_S)
    with path.open("w") as file:
        await Soak(load, file, FAULT_EVERY_S).run(SOAK_S, CLIENTS_PER_ROUTER, HTTP_CLIENTS)
    found = samples.read(path)
    sys.stdout.write("\n" + "\n".join(samples.table(found)) + "\n")
    figures.state_soak(evidence, found)
    figures.state_processes(evidence, cluster)
