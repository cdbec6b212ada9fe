"""One name for two revisions of a model: the share of each, pinned requests, and losses."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

import tandem
from mesh.domain.worker import Adapter
from tandem.v1 import generation_pb2
from tests.exposition import scrape
from tests.fakes.router_workers import FakeDecodeWorker, FakePrefillWorker, expected_tokens
from tests.service.conftest import Mesh

PROMPT = [65, 66, 67, 68]


@asynccontextmanager
async def mesh_of(model_dir: Path, **settings: Any) -> AsyncIterator[Mesh]:
    """A router of the revisions v1 and v2, without workers."""
    mesh = Mesh(model_dir, models=f"v1={model_dir},v2={model_dir}", **settings)
    await mesh.start()
    try:
        yield mesh
    finally:
        await mesh.stop()


@asynccontextmanager
async def operated(model_dir: Path, **settings: Any) -> AsyncIterator[tuple[Mesh, tandem.AsyncClient]]:
    """The same, and an operator's client."""
    async with mesh_of(model_dir, **settings) as mesh, tandem.AsyncClient(mesh.router.public.address) as client:
        yield mesh, client


async def add(mesh: Mesh, revision: str, number: int = 0) -> FakeDecodeWorker:
    """A decode worker of a revision, that may get requests."""
    worker: FakeDecodeWorker = await mesh.add(FakeDecodeWorker, f"{revision}-decode-{number}", model=revision)
    router = next(each for each in mesh.router.model_routers if each.model.name == revision)
    await mesh.until(lambda: worker.info.incarnation in router.mesh.serving())
    return worker


async def answering(mesh: Mesh, count: int, model: str = "chat") -> Counter[str]:
    """How many of some requests for the name each revision answers."""
    found: Counter[str] = Counter()
    prompts = [[65 + number % 26, 65 + number // 26] for number in range(count)]
    for first in range(0, count, 8):
        for worker in mesh.workers:
            worker.beat()
        calls = (mesh.generate(token_ids=ids, model=model, max_new_tokens=1) for ids in prompts[first : first + 8])
        found.update([result.messages[0].prompt.model for result in await asyncio.gather(*calls)])
    return found


async def test_requests_are_shared_out_and_an_operator_shifts_them(model_dir: Path) -> None:
    async with (
        mesh_of(model_dir, traffic="chat=v1:1") as mesh,
        tandem.AsyncClient(mesh.router.public.address) as client,
    ):
        workers = {name: await add(mesh, name) for name in ("v1", "v2")}
        assert await answering(mesh, 20) == {"v1": 20}
        await client.set_traffic("chat", {"v1": 50, "v2": 50})
        assert (await client.mesh()).traffic == {"chat": {"v1": 50, "v2": 50}}
        counts = await answering(mesh, 200)
        assert 60 < counts["v2"] < 140, counts  # mean 100, standard deviation 7
        assert len(workers["v2"].started.items) == counts["v2"]
        routed = (await client.mesh()).routed["chat"]
        assert routed.requests == counts, "those since the shares changed"
        assert 0 < routed.span_s < 300
        await client.set_traffic("chat", {"v2": 1, "v1": 0})
        assert await answering(mesh, 20) == {"v2": 20}
        assert (await client.mesh()).traffic == {"chat": {"v2": 1}}


async def test_a_client_pins_a_revision_by_its_name(model_dir: Path) -> None:
    async with mesh_of(model_dir, traffic="chat=v1:1") as mesh:
        await add(mesh, "v1")
        pinned = await add(mesh, "v2")
        assert await answering(mesh, 1, model="v2") == {"": 1}
        assert len(pinned.started.items) == 1
        assert not mesh.router.traffic.num_routed, "it was no request for the shared name"
        listed = (await mesh.stub.ListModels(generation_pb2.ListModelsRequest())).models
        assert [model.name for model in listed] == ["chat", "v1", "v2"]
        assert (await mesh.stub.GetModel(generation_pb2.GetModelRequest(model="chat"))).model.name == "chat"
        tokens = (await mesh.stub.Tokenize(generation_pb2.TokenizeRequest(prompt="x", model="chat"))).tokens
        assert len(tokens) == 1


async def test_prompts_are_not_hashed_where_no_name_stands_for_several_models(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[object] = []
    monkeypatch.setattr(
        "router.service_directory.conversation_key", lambda prompt, tenant: hashed.append(prompt) or b""
    )
    async with mesh_of(model_dir, traffic="chat=v1:1") as mesh:
        await add(mesh, "v1")
        await answering(mesh, 1, model="v1")
        assert hashed == []
        await answering(mesh, 1)
        assert len(hashed) == 1


async def test_one_name_for_all_models_need_not_be_given(model_dir: Path) -> None:
    async with mesh_of(model_dir, traffic="chat=v1:1,v2:1") as mesh:
        await add(mesh, "v1")
        await add(mesh, "v2")
        counts = await answering(mesh, 40, model="")
        assert counts.keys() == {"v1", "v2"}
        assert (await mesh.stub.GetModel(generation_pb2.GetModelRequest())).model.name == "chat"


async def test_a_stream_stays_in_its_revision_when_its_worker_dies(model_dir: Path) -> None:
    """Replayed by the other worker of its revision, although all new requests go elsewhere by then."""
    async with mesh_of(model_dir, traffic="chat=v2:1") as mesh:
        other = await add(mesh, "v1")
        workers = [await add(mesh, "v2", number) for number in range(2)]
        for worker in workers:
            worker.gate.close()
        stream = asyncio.create_task(mesh.generate(token_ids=PROMPT, model="chat", max_new_tokens=8))
        await mesh.until(lambda: any(worker.started.items for worker in workers))
        victim, survivor = sorted(workers, key=lambda worker: -len(worker.started.items))
        victim.gate.allow(3)
        await victim.sent.wait_len(3)
        mesh.router.traffic.share_out("chat", {"v1": 1})
        survivor.gate.open()
        await victim.kill()
        result = await stream
        assert result.ids() == expected_tokens(PROMPT, 8)
        assert len(survivor.started.items) == 1
        assert other.started.items == []


async def test_prompts_are_handed_over_within_a_revision_only(model_dir: Path) -> None:
    async with mesh_of(model_dir, traffic="chat=v1:1,v2:1") as mesh:
        prefills = {}
        for name, router in zip(("v1", "v2"), mesh.router.model_routers, strict=True):
            await add(mesh, name)
            prefills[name] = await mesh.add(FakePrefillWorker, f"{name}-prefill-0", model=name)
            await mesh.until(lambda router=router: router.mesh.serving(prefills["v1"].role))
            await mesh.until(lambda router=router: not router.mesh.snapshot().local_only)
        counts = await answering(mesh, 40)
        for name, prefill in prefills.items():
            assert len(prefill.calls.items) == counts[name] > 0
            assert {call.destination.worker_id for call in prefill.calls.items} == {f"{name}-decode-0"}


async def test_a_revision_without_workers_leaves_its_share_to_the_other(model_dir: Path) -> None:
    async with mesh_of(model_dir, traffic="chat=v1:1,v2:1") as mesh:
        await add(mesh, "v1")
        leaving = await add(mesh, "v2")
        await leaving.kill()
        await mesh.until(lambda: not mesh.router.model_routers[1].mesh.has_path)
        with capture_logs() as logs:
            assert await answering(mesh, 20) == {"v1": 20}
        lines = [line for line in logs if line["event"] == "a revision has no workers: others get its share"]
        assert [line["revision"] for line in lines] == ["v2"]


async def test_a_call_that_is_sent_again_reaches_the_revision_that_began_it(model_dir: Path) -> None:
    """Two routers that know different shares: the SDK asks the second one for the revision of the first."""
    async with mesh_of(model_dir, traffic="chat=v2:1") as dying, mesh_of(model_dir, traffic="chat=v1:1") as other:
        first, second, wrong = await add(dying, "v2"), await add(other, "v2"), await add(other, "v1")
        first.gate.close()
        addresses = f"{dying.router.public.address},{other.router.public.address}"
        async with tandem.AsyncClient(addresses) as client:
            events = []
            stream = client.stream(token_ids=PROMPT, model="chat", max_new_tokens=8)
            first.gate.allow(2)
            async for event in stream:
                events.append(event)
                if len(events) == 2:
                    await dying.router.public.grpc.stop(0)
        assert [event.token.id for event in events if event.token] == expected_tokens(PROMPT, 8)
        assert {event.model for event in events} == {"v2"}
        assert len(second.started.items) == 1
        assert wrong.started.items == []


async def test_refused_requests_are_not_counted(model_dir: Path) -> None:
    async with mesh_of(model_dir, traffic="chat=v1:1") as mesh:
        await add(mesh, "v1")
        with pytest.raises(grpc.aio.AioRpcError, match="max_new_tokens"):
            await mesh.generate(token_ids=PROMPT, model="chat", max_new_tokens=100_000)
        assert await answering(mesh, 3) == {"v1": 3}
        assert mesh.router.traffic.routed("chat").counts == {"v1": 3}


async def test_a_name_is_removed(model_dir: Path) -> None:
    async with operated(model_dir, traffic="chat=v1:1") as (mesh, client):
        await client.set_traffic("other", {"v2": 1})
        await client.set_traffic("chat", {"v1": 0})
        shown = await client.mesh()
        assert shown.traffic == {"other": {"v2": 1}}
        assert shown.routed.keys() == {"other"}
        assert [model.name for model in await client.models()] == ["other", "v1", "v2"]
        with pytest.raises(tandem.ModelNotFound):
            await client.model("chat")
        with pytest.raises(tandem.InvalidRequest, match="is no name for revisions"):
            await client.set_traffic("v1=50", {"v2": 50})
        assert await scrape(mesh.router.metrics.registry)


async def test_wrong_shares_are_refused_in_words(model_dir: Path) -> None:
    async with operated(model_dir) as (mesh, client):
        with pytest.raises(tandem.InvalidRequest, match="'v3' is not served here; served: v1, v2"):
            await client.set_traffic("chat", {"v3": 1})
        with pytest.raises(grpc.aio.AioRpcError, match="'chat' is not served here"):
            await mesh.stub.GetModel(generation_pb2.GetModelRequest(model="chat"))
        await client.set_traffic("chat", {"v1": 1})
        with pytest.raises(tandem.ModelNotFound, match="'chatt' is not served here; served: chat, v1, v2"):
            await client.generate(token_ids=PROMPT, model="chatt")


async def test_the_name_of_an_adapter_stands_for_no_revisions(model_dir: Path) -> None:
    """Requests for the adapter would be answered without it."""
    async with operated(model_dir) as (mesh, client):
        await mesh.add(FakeDecodeWorker, "v2-decode", model="v2", adapters=(Adapter("mine", "digest"),))
        v2 = mesh.router.model_routers[1]
        await mesh.until(lambda: v2.mesh.has_path)
        with pytest.raises(tandem.InvalidRequest, match="'mine' cannot stand for revisions: it is an adapter of v2"):
            await client.set_traffic("mine", {"v1": 1})
        result = await client.generate(token_ids=PROMPT, model="mine", max_new_tokens=1)
        assert [token.id for token in result.tokens] == expected_tokens(PROMPT, 1)
        assert (await client.mesh()).traffic == {}
