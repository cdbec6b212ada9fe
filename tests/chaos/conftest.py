"""One cluster for all tests of a module, and what its undisturbed answers are."""

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos.cluster import Cluster, Shape, running
from tests.chaos.load import Catalogue
from tests.e2e.conftest import checkpoint, reference
from tests.e2e.reference import Reference

__all__ = ["catalogue", "checkpoint", "cluster", "reference"]

# Both ways of payload are in use, and workers with a prefix cache as well as those whose every prompt is transferred.
FLAGS = {
    "prefill-1": ("--prefix-caching=false",),
    "decode-1": ("--prefix-caching=false", "--kv-transports=grpc"),
    "decode-2": ("--prefix-caching=false", "--kv-transports=grpc"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """Two routers, two prefill and three decode workers, Redis."""
    if sys.platform != "linux":
        pytest.skip("proxies listen on 127.0.0.2, which only Linux has from the start")
    shape = Shape(checkpoint("llama-tied"), tmp_path_factory.mktemp("logs"), flags=FLAGS)
    async with running(shape) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def catalogue(cluster: Cluster, reference: Callable[[str], Reference]) -> Catalogue:
    """The fixed set with its answers; the plain greedy ones are held against transformers."""
    learnt = await Catalogue.learn(cluster)
    for name in learnt.plain_greedy():
        reference("llama-tied").check_greedy(list(learnt.asks[name]["token_ids"]), learnt.answers[name].tokens)
    return learnt
