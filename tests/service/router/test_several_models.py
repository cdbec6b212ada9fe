"""Two models behind one router: requests go by name, and neither feels the other's load or loss."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from mesh.domain.errors import ConfigurationError
from router.settings import RouterSettings
from tandem.v1 import generation_pb2, mesh_pb2, mesh_pb2_grpc
from tests.fakes.router_model import write_checkpoint
from tests.fakes.router_workers import FakeDecodeWorker, FakePrefillWorker
from tests.service.conftest import Mesh, make_request


@pytest.fixture
async def pair(tmp_path: Path, model_dir: Path) -> Any:
    """A mesh of models a and b; the positions of b's are fewer."""
    small = write_checkpoint(tmp_path / "small", max_positions=64)
    mesh = Mesh(model_dir, models=f"a={model_dir},b={small}", max_concurrent_requests=1, max_queued_requests=1)
    await mesh.start()
    yield mesh
    await mesh.stop()


async def add(mesh: Mesh, model: str, **changes: Any) -> FakeDecodeWorker:
    worker: FakeDecodeWorker = await mesh.add(FakeDecodeWorker, f"{model}-decode-0", model=model, **changes)
    router = next(each for each in mesh.router.model_routers if each.model.name == model)
    await mesh.until(lambda: router.mesh.has_path)
    return worker


async def test_requests_go_to_the_model_they_name(pair: Mesh) -> None:
    a, b = await add(pair, "a"), await add(pair, "b")
    prefill = await pair.add(FakePrefillWorker, "b-prefill-0", model="b")
    await pair.until(lambda: pair.router.model_routers[1].mesh.serving(prefill.role))
    for model, worker, other in (("a", a, b), ("b", b, a)):
        before = len(other.started.items)
        result = await pair.generate(prompt="hello", model=model, max_new_tokens=3)
        assert len(result.ids()) == 3
        assert worker.started.items
        assert len(other.started.items) == before
    listed = await pair.stub.ListModels(generation_pb2.ListModelsRequest())
    assert [(model.name, model.max_total_tokens, model.ready) for model in listed.models] == [
        ("a", 256, True),
        ("b", 64, True),
    ]
    mesh_stub = mesh_pb2_grpc.MeshStub(pair.channel)
    workers = (await mesh_stub.ListWorkers(mesh_pb2.ListWorkersRequest())).workers
    assert [each.record.model for each in workers] == ["a", "b", "b"]


@pytest.mark.parametrize(
    ("model", "code", "said"),
    [
        ("c", grpc.StatusCode.NOT_FOUND, "model 'c' is not served here; served: a, b"),
        ("", grpc.StatusCode.INVALID_ARGUMENT, "name one of those served here: a, b"),
    ],
)
async def test_other_names_are_refused(pair: Mesh, model: str, code: grpc.StatusCode, said: str) -> None:
    for call in (
        pair.stub.GetModel(generation_pb2.GetModelRequest(model=model)),
        pair.stub.Tokenize(generation_pb2.TokenizeRequest(prompt="x", model=model)),
        pair.stub.Generate(make_request(prompt="x", model=model)).read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
        assert raised.value.code() is code
        assert said in (raised.value.details() or "")


async def test_caps_queues_and_losses_are_each_models_own(pair: Mesh) -> None:
    a, b = await add(pair, "a"), await add(pair, "b")
    a.gate.close()
    running = asyncio.create_task(pair.generate(prompt="hello", model="a", max_new_tokens=3))
    await pair.until(lambda: pair.router.model_routers[0].limiter.num_held == 1)
    with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
        await pair.generate(prompt="hello", model="a")
    assert len((await pair.generate(prompt="hello", model="b", max_new_tokens=3)).ids()) == 3
    await b.kill()
    await pair.until(lambda: not pair.router.model_routers[1].mesh.has_path)
    a.gate.open()
    assert len((await running).ids()) == 3
    ready = {
        model.name: model.ready for model in (await pair.stub.ListModels(generation_pb2.ListModelsRequest())).models
    }
    assert ready == {"a": True, "b": False}


async def test_a_worker_of_a_third_model_is_refused(pair: Mesh) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="serves model 'a' and 'b', worker w 'c'"):
        await pair.add(FakeDecodeWorker, "w", model="c")


def test_wrong_names() -> None:
    with pytest.raises(ConfigurationError, match="two models are named a"):
        RouterSettings(model="a=x,a=y").each_model()
    with pytest.raises(ConfigurationError, match="name is for one model"):
        RouterSettings(model="a=x,b=y", name="c").each_model()
    assert [each.served_name for each in RouterSettings(model="a=x,b=s3://bucket/y").each_model()] == ["a", "b"]
