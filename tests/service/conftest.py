"""A router with fake workers, all in this process, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from checkpoint.model_facts import read_model_facts
from mesh.domain.worker import WorkerInfo, WorkerRole
from mesh.rpc.channel import open_channel
from router.__main__ import RouterProcess
from router.model_router import ModelRouter
from router.settings import RouterSettings
from router.workers import coordination
from router.workers.health import Trust
from tandem.v1 import generation_pb2, generation_pb2_grpc
from tests.fakes.router_model import write_checkpoint
from tests.fakes.router_workers import FakeDecodeWorker, FakePrefillWorker, FakeWorker
from tests.waiting import LIMIT_S, until


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


class Mesh:
    """One router and its workers. A router that has `just_started` waits for workers that it may have had before;
    others refuse at once what no worker can do.
    """

    def __init__(self, model_dir: Path, models: str = "", *, just_started: bool = False, **settings: Any) -> None:
        self.just_started = just_started
        self.model_dir = model_dir
        self.settings = RouterSettings(model=models or str(model_dir), port=0, registry_port=0, **settings)
        self.router = RouterProcess(self.settings)
        self.workers: list[FakeWorker] = []

    @property
    def model(self) -> ModelRouter:
        """The router's part of the only model, or the first."""
        return self.router.model_routers[0]

    async def start(self) -> None:
        await self.router.start()
        if not self.just_started:
            for model in self.router.model_routers:
                model.service._workers_back_by_s = 0.0
        self.channel = open_channel(self.router.public.address)
        self.stub = generation_pb2_grpc.GenerationStub(self.channel)

    async def add(self, worker_class: type[FakeWorker], name: str, canary: Any = None, **changes: Any) -> Any:
        """A worker that has registered; `canary` is the script of its canaries."""
        fingerprint = read_model_facts(self.model_dir).tokenizer_fingerprint
        identity = {
            "model": "tiny",
            "tokenizer_fingerprint": fingerprint,
            "mesh_key": self.settings.mesh_key,
            "tls": self.settings.load_credentials().tls,
        } | changes
        worker: Any = worker_class(name, **identity)
        worker.canary = canary or worker.canary
        self.workers.append(worker)
        await worker.start()
        await worker.register(self.router.coordination.address)
        return worker

    async def decode(self, name: str = "decode-0", *, settle: bool = True, **changes: Any) -> FakeDecodeWorker:
        worker: FakeDecodeWorker = await self.add(FakeDecodeWorker, name, **changes)
        if settle:
            await self.until(lambda: self.is_settled(worker))
        return worker

    async def prefill(self, name: str = "prefill-0", *, settle: bool = True, **changes: Any) -> FakePrefillWorker:
        worker: FakePrefillWorker = await self.add(FakePrefillWorker, name, **changes)
        if settle:
            await self.until(lambda: self.is_settled(worker))
        return worker

    def is_settled(self, worker: FakeWorker) -> bool:
        """True once the worker can get work, and everybody is proven as far as the others allow."""
        usable = self.model.mesh.usable()
        roles = {info.role for info in usable}
        best = {
            WorkerRole.PREFILL: Trust.FULL if WorkerRole.DECODE in roles else Trust.NONE,
            WorkerRole.DECODE: Trust.FULL if WorkerRole.PREFILL in roles else Trust.LOCAL,
        }
        return worker.info in usable and all(self.trust(info) is best[info.role] for info in usable)

    def trust(self, worker: FakeWorker | WorkerInfo) -> Trust:
        """What the router holds of a worker."""
        return self.model.health.trust(worker.info if isinstance(worker, FakeWorker) else worker)

    async def until(self, condition: Any, *, timeout_s: float = LIMIT_S) -> None:
        """Return when the condition holds: for inner states that announce no change."""
        await until(condition, within_s=timeout_s, state=self._state)

    def _state(self) -> str:
        usable = [info.worker_id for info in self.model.mesh.usable()]
        return f"{self.model.queue.num_queued} queued, usable workers {usable}"

    async def generate(self, **request: Any) -> "Result":
        result = Result()
        await result.read(self.stub.Generate(make_request(**request), timeout=LIMIT_S))
        return result

    async def stop(self) -> None:
        await self.channel.close()
        await self.router.stop(0.2)
        await asyncio.gather(*(worker.kill() for worker in self.workers))

    def assert_at_rest(self) -> None:
        assert self.model.limiter.num_held == 0
        assert self.model.queue.num_queued == 0
        assert not self.model.in_flight.by_worker()


class Result:
    """What a client got."""

    def __init__(self) -> None:
        self.messages: list[generation_pb2.GenerateResponse] = []

    async def read(self, call: Any) -> None:
        async for message in call:
            self.messages.append(message)

    def of(self, index: int = 0) -> list[generation_pb2.GenerateResponse]:
        return [message for message in self.messages if message.index == index]

    def ids(self, index: int = 0) -> list[int]:
        return [token.id for token in self.tokens(index)]

    def tokens(self, index: int = 0) -> list[generation_pb2.Token]:
        return [token for message in self.of(index) for token in message.tokens]

    def text(self, index: int = 0) -> str:
        return "".join(token.text for token in self.tokens(index))

    def finish(self, index: int = 0) -> int:
        """The finish reason, which must be on the last message and only there."""
        *others, last = self.of(index)
        assert not any(message.finish_reason for message in others)
        assert last.finish_reason
        assert last.HasField("usage")
        return last.finish_reason


def make_request(
    token_ids: Any = (), prompt: str | None = None, chat: Any = None, output: Any = None, **request: Any
) -> generation_pb2.GenerateRequest:
    """`sampling` and `output` are dicts; everything else is a field."""
    names = ("model", "adapter", "num_choices", "best_of", "priority", "ttft_target", "cache_hints")
    fields: dict[str, Any] = {name: request.pop(name) for name in names if name in request}
    if prompt is not None:
        fields["prompt"] = prompt
    elif chat is not None:
        fields["chat"] = {"messages": [{"role": role, "content": content} for role, content in chat]}
    else:
        fields["token_ids"] = {"ids": list(token_ids)}
    return generation_pb2.GenerateRequest(sampling=request, output=output or {}, **fields)


@pytest.fixture
async def make_mesh(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    # Fake workers send heartbeats only when they are told to. A busy machine takes longer than a silent worker has.
    monkeypatch.setattr(coordination, "SILENT_S", 3600.0)
    async with AsyncExitStack() as meshes:

        async def make(*, model_positions: int = 512, adds_bos: bool = False, **settings: Any) -> Mesh:
            folder = model_dir
            if model_positions != 512 or adds_bos:
                folder = write_checkpoint(tmp_path / "tiny", max_positions=model_positions, adds_bos=adds_bos)
            mesh = Mesh(folder, **settings)
            await mesh.start()
            meshes.push_async_callback(mesh.stop)
            return mesh

        yield make
