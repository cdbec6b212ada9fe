"""Every method of every service without, and with a wrong, credential; which methods there are, descriptors tell."""

import asyncio
import importlib
import pkgutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import mesh.v1
import tandem.v1
from engine.runner_settings import RunnerSettings
from mesh.domain.kv import Degrees
from mesh.domain.worker import WorkerInfo, WorkerRole
from mesh.rpc.channel import open_channel
from mesh.rpc.credentials import MeshKey
from mesh.rpc.server import Listen
from tests.evidence import Evidence
from tests.fakes.runner import FAKE_LAYOUT
from tests.service.security.keys import KEYS, MESH_KEY, bearer, write_keys
from tests.service.worker_rig import worker_rig
from tests.waiting import LIMIT_S
from worker.ranks.listener import RankListener
from worker.role_server import RoleServer
from worker.settings import WorkerSettings

LAYOUT = replace(FAKE_LAYOUT, num_kv_heads=2)
OPEN = tuple(f"grpc.health.v1.Health.{name}" for name in ("Check", "List", "Watch"))
BAD_CREDENTIALS: list[tuple[tuple[str, str], ...]] = [
    (),
    (("authorization", "Bearer wrong-wrong-wrong-wrong"),),
    (("authorization", "Bearer "),),
    (("authorization", KEYS["alice"]),),
    (("authorization", f"Basic {MESH_KEY}"),),
    (("x-api-key", "wrong-wrong-wrong-wrong"),),
    (("authorization", f"Bearer {MESH_KEY[:-1]}"),),
]


def own_methods() -> Iterator[MethodDescriptor]:
    """All methods of all services that protos/ defines."""
    for package in (tandem.v1, mesh.v1):
        for module in pkgutil.iter_modules(package.__path__):
            if module.name.endswith("_pb2"):
                file = importlib.import_module(f"{package.__name__}.{module.name}").DESCRIPTOR
                for service in file.services_by_name.values():
                    yield from service.methods


def foreign_methods() -> Iterator[MethodDescriptor]:
    """Methods of the services that come with gRPC."""
    for file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        for service in file.services_by_name.values():
            yield from service.methods


async def status_of(
    channel: grpc.aio.Channel, method: MethodDescriptor, metadata: Any, *, is_read: bool = True
) -> grpc.StatusCode:
    """Call with one empty message; OK as soon as the server answers anything. A stream whose messages should not be
    read sends none: it could fail before the server's status is there.
    """
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    path = f"/{method.containing_service.full_name}/{method.name}"
    open_call = kinds[method.client_streaming, method.server_streaming](path)
    request: Any = iter([b""] if is_read else []) if method.client_streaming else b""
    call = open_call(request, metadata=metadata, timeout=LIMIT_S)
    try:
        await (call.read() if method.server_streaming else call)
        done = call.done()
    except grpc.aio.AioRpcError as error:
        return error.code()
    code = await call.code() if done else grpc.StatusCode.OK
    call.cancel()
    return code


class NoEngine:
    """An engine that nobody reaches."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was reached without a credential")


@asynccontextmanager
async def worker_server(model_dir: Path) -> AsyncIterator[str]:
    """A worker's own server as the worker programs build it: the Worker service."""
    settings = WorkerSettings(model=str(model_dir), registry_address="127.0.0.1:1", mesh_key=MESH_KEY)
    info = WorkerInfo(
        "w", "w-1", WorkerRole.DECODE, "", "tiny", "t", FAKE_LAYOUT, 16, 4, num_blocks=16, max_model_len=64
    )
    role_server = RoleServer(settings, info, NoEngine())
    await role_server.server.start(["mesh.v1.Worker"])
    try:
        yield role_server.info.address
    finally:
        await role_server.server.stop(0)


@asynccontextmanager
async def rank_listener(model_dir: Path) -> AsyncIterator[str]:
    """A leader that waits for its ranks."""
    listener = RankListener(
        Listen("127.0.0.1", 0, MeshKey(MESH_KEY)),
        Degrees(2),
        timeout_s=LIMIT_S,
        on_leaving=lambda: pytest.fail("a rank is in"),
    )
    gathering = asyncio.create_task(asyncio.to_thread(listener.gather, RunnerSettings(model_dir), LAYOUT))
    try:
        yield f"127.0.0.1:{listener.port}"
    finally:
        await asyncio.to_thread(listener.close)
        await asyncio.gather(gathering, return_exceptions=True)


@asynccontextmanager
async def all_services(make_mesh: Any, tmp_path: Path, model_dir: Path) -> AsyncIterator[dict[str, str]]:
    """Addresses by service name, of everything a cluster consists of."""
    mesh = await make_mesh(mesh_key=MESH_KEY, api_keys_file=write_keys(tmp_path))
    async with (
        worker_rig() as rig,
        worker_server(model_dir) as worker_address,
        rank_listener(model_dir) as listener_address,
    ):
        yield {
            "tandem.v1.Generation": mesh.router.public.address,
            "tandem.v1.Mesh": mesh.router.public.address,
            "mesh.v1.Registry": mesh.router.coordination.address,
            "mesh.v1.Prefill": rig.prefill_address,
            "mesh.v1.Decode": rig.decode_address,
            "mesh.v1.KvTransfer": rig.decode_address,
            "mesh.v1.Worker": worker_address,
            "mesh.v1.Ranks": listener_address,
        }


async def test_every_method_wants_a_credential(
    make_mesh: Any, tmp_path: Path, model_dir: Path, evidence: Evidence
) -> None:
    methods = list(own_methods())
    assert len(methods) >= 10
    async with all_services(make_mesh, tmp_path, model_dir) as addresses:
        assert {method.containing_service.full_name for method in methods} == addresses.keys()
        let_in = []
        for address in sorted(set(addresses.values())):
            here = [m for m in methods if addresses[m.containing_service.full_name] == address]
            async with open_channel(address) as channel:
                foreign = () if address == addresses["mesh.v1.Ranks"] else foreign_methods()
                for method in (*here, *foreign):
                    is_open = method.full_name in OPEN
                    asked = (status_of(channel, method, each, is_read=is_open) for each in BAD_CREDENTIALS)
                    codes = await asyncio.gather(*asked)
                    expected = grpc.StatusCode.OK if is_open else grpc.StatusCode.UNAUTHENTICATED
                    let_in += [(method.full_name, code) for code in codes if code is not expected]
    assert let_in == []
    tried = f"{len(methods)} methods, {len(BAD_CREDENTIALS)} wrong credentials each"
    evidence("R15", "calls let in without the right credential", f"0; {tried}", target="0", ok=True)


async def test_keys_of_one_plane_are_worth_nothing_in_the_other(make_mesh: Any, tmp_path: Path) -> None:
    mesh = await make_mesh(mesh_key=MESH_KEY, api_keys_file=write_keys(tmp_path))
    register = next(m for m in own_methods() if m.name == "Register")
    models = next(m for m in own_methods() if m.name == "ListModels")
    async with (
        open_channel(mesh.router.coordination.address) as inside,
        open_channel(mesh.router.public.address) as outside,
    ):
        assert await status_of(inside, register, bearer("ops"), is_read=False) is grpc.StatusCode.UNAUTHENTICATED
        mesh_key = (("authorization", f"Bearer {MESH_KEY}"),)
        assert await status_of(outside, models, mesh_key) is grpc.StatusCode.UNAUTHENTICATED
        assert await status_of(outside, models, bearer("alice")) is grpc.StatusCode.OK
        assert await status_of(outside, models, (("x-api-key", KEYS["alice"]),)) is grpc.StatusCode.OK


async def test_only_operators_see_workers_and_reflection_wants_a_key(make_mesh: Any, tmp_path: Path) -> None:
    mesh = await make_mesh(api_keys_file=write_keys(tmp_path))
    list_workers = next(m for m in own_methods() if m.name == "ListWorkers")
    reflect = next(m for m in foreign_methods() if m.name == "ServerReflectionInfo")
    async with open_channel(mesh.router.public.address) as channel:
        assert await status_of(channel, list_workers, bearer("alice")) is grpc.StatusCode.PERMISSION_DENIED
        assert await status_of(channel, list_workers, bearer("ops")) is grpc.StatusCode.OK
        assert await status_of(channel, reflect, bearer("alice")) is grpc.StatusCode.OK


@pytest.mark.parametrize("count", [1, 100])
async def test_without_keys_nobody_needs_one(make_mesh: Any, count: int) -> None:
    mesh = await make_mesh()
    list_workers = next(m for m in own_methods() if m.name == "ListWorkers")
    async with open_channel(mesh.router.public.address) as channel:
        metadata = (("authorization", "x" * count),)
        assert await status_of(channel, list_workers, metadata) is grpc.StatusCode.OK
