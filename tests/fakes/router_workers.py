"""Prefill and decode workers for router tests: real gRPC services over a model that is a function of the prefix.

`next_token` decides every token, so a replay must give the same tokens. Each worker follows scripts: how its next
sequences or calls go wrong. Tokens flow freely, at a pace (`pace_s`, seconds for each), or one by one while `gate` is
set and a test calls `allow`.

Canaries are kept apart: they use up no scripts, pass the gate, and are noted in `canaries` only. They go well, or as
`canary` says.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import grpc

from mesh import wire
from mesh.domain.errors import MeshError, TransferFailed, WorkerLost
from mesh.domain.kv import KVLayout
from mesh.domain.request import SequenceSpec
from mesh.domain.tokens import FinishReason, PromptLogprob, SampledToken, SequenceFailure, SequenceOutput, TokenLogprob
from mesh.domain.worker import WorkerInfo, WorkerLoad, WorkerRole, WorkerState
from mesh.rpc.channel import open_channel
from mesh.rpc.credentials import Credentials, MeshKey
from mesh.rpc.server import Listen, Server
from mesh.rpc.status import FirstStatus
from mesh.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.workers.canary import NAMESPACE
from tests.waiting import LIMIT_S

BLOCK_SIZE = 4
LAYOUT = KVLayout("fake", num_layers=1, num_kv_heads=1, head_dim=8, block_size=BLOCK_SIZE, dtype="float32")
_FIRST_PLAIN_ID, _NUM_PLAIN_IDS = 60, 200


def next_token(prefix: Sequence[int], biased: Sequence[int] = ()) -> int:
    """The fake model. Biased ids (logit_bias) come in turn, so that tests can ask for given texts."""
    if biased:
        return biased[len(prefix) % len(biased)]
    return (
        _FIRST_PLAIN_ID + (sum((position % 7 + 1) * id_ for position, id_ in enumerate(prefix)) * 31) % _NUM_PLAIN_IDS
    )


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that generation must give after `prompt`."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


def is_canary(spec: SequenceSpec) -> bool:
    """True for a request of the router's own."""
    return NAMESPACE in spec.cache_namespace


class FakeModel:
    """Generates the tokens of one attempt."""

    def __init__(self, spec: SequenceSpec) -> None:
        self.request = spec
        self._ids = list(spec.token_ids)

    def step(self, *, with_prompt: bool = False, cached_tokens: int = 0) -> SequenceOutput:
        request = self.request
        token_id = next_token(self._ids, sorted(request.sampling.logit_bias))
        index = len(self._ids) - request.num_prompt_tokens
        self._ids.append(token_id)
        top = tuple(TokenLogprob(token_id + rank, -1.0 - rank) for rank in range(request.top_logprobs))
        token = SampledToken(token_id, -float(index) - 0.5, top)
        prompt = with_prompt and request.prompt_logprobs
        logprobs = tuple(PromptLogprob(-1.0 if place else None, top) for place in range(request.num_prompt_tokens))
        return SequenceOutput(
            request.request_id,
            request.attempt,
            index,
            (token,),
            self._finish(token_id),
            logprobs if prompt else (),
            cached_tokens,
        )

    def take_over(self, token_id: int) -> bool:
        """Somebody else has sampled the first token. False if it is the last one."""
        self._ids.append(token_id)
        return self._finish(token_id) is None

    def _finish(self, token_id: int) -> FinishReason | None:
        sampling = self.request.sampling
        if token_id in self.request.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.EOS_TOKEN
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP_SEQUENCE
        return FinishReason.LENGTH if len(self._ids) >= self.request.max_total_tokens else None


class Gate:
    """Lets tokens pass one by one once closed."""

    def __init__(self) -> None:
        self._open = True
        self._allowed = asyncio.Semaphore(0)

    def close(self) -> None:
        """From now on only what `allow` allows."""
        self._open = False

    def allow(self, count: int) -> None:
        for _ in range(count):
            self._allowed.release()

    def open(self) -> None:
        self._open = True
        self.allow(1000)

    async def passed(self) -> None:
        """Return when one may pass."""
        if self._open:
            await asyncio.sleep(0)
        else:
            await self._allowed.acquire()


class Journal:
    """A growing list that tests can wait on."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._grown = asyncio.Event()

    def add(self, item: Any) -> None:
        self.items.append(item)
        self._grown.set()

    async def wait_for(self, item: Any, *, timeout_s: float = LIMIT_S) -> None:
        """Return when `item` is noted."""
        await self._until(lambda: item in self.items, f"{item!r} is noted", timeout_s)

    async def wait_len(self, count: int, *, timeout_s: float = LIMIT_S) -> None:
        """Return when this many are noted."""
        await self._until(lambda: len(self.items) >= count, f"{count} items are noted", timeout_s)

    async def _until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._grown.clear()
                    await self._grown.wait()
        except TimeoutError:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}; noted: {self.items!r}") from None


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """A server with one worker's identity, registered with a router over the real Registry stream."""

    role: ClassVar[WorkerRole]
    num_running: int
    """Sequences or prompts not ended."""

    def __init__(self, worker_id: str, *, model: str, tokenizer_fingerprint: str, **changes: Any) -> None:
        mesh_key = changes.pop("mesh_key", None)
        self.credentials = Credentials(MeshKey(mesh_key) if mesh_key else None, changes.pop("tls", None))
        self.server = Server(Listen("127.0.0.1", 0, self.credentials.key, tls=self.credentials.tls))
        self.load = WorkerLoad(free_blocks=changes.get("num_blocks", 64))
        self.state = WorkerState.READY
        self.canaries = Journal()
        self.wanted_roles: list[WorkerRole] = []
        self._identity: dict[str, Any] = {
            "worker_id": worker_id,
            "incarnation": changes.pop("incarnation", f"{worker_id}-1"),
            "role": self.role,
            "model": model,
            "tokenizer_fingerprint": tokenizer_fingerprint,
            "layout": LAYOUT,
            "max_batch_tokens": 32,
            "max_num_seqs": 8,
            "num_blocks": 64,
            "max_model_len": 256,
        } | changes
        self._beats: asyncio.Queue[worker_pb2.RegisterRequest] = asyncio.Queue()
        self._registration: asyncio.Task[None] | None = None
        self.registered = asyncio.Event()

    @property
    def info(self) -> WorkerInfo:
        """The worker's identity; complete once started."""
        return WorkerInfo(address=self.server.address, **self._identity)

    async def start(self) -> None:
        self._add_servicer()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self.server.grpc)
        await self.server.start([])

    def _add_servicer(self) -> None:
        raise NotImplementedError

    async def register(self, registry_address: str) -> None:
        """Join the mesh; returns when the router has answered."""
        self._registration = asyncio.create_task(self._register(registry_address))
        registered = asyncio.create_task(self.registered.wait())
        done, _ = await asyncio.wait(
            [self._registration, registered], timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED
        )
        registered.cancel()
        assert done, f"{self.info.worker_id} heard nothing from the registry at {registry_address} in {LIMIT_S:g} s"
        if self._registration.done():
            self._registration.result()

    def beat(self, state: WorkerState = WorkerState.READY) -> None:
        beat = worker_pb2.Heartbeat(load=wire.load_to_proto(self.load), state=wire.state_to_proto(state))
        self._beats.put_nowait(worker_pb2.RegisterRequest(heartbeat=beat))

    async def SetDraining(self, request: worker_pb2.SetDrainingRequest, context: Any) -> worker_pb2.SetDrainingResponse:
        self.beat(WorkerState.DRAINING if request.draining else WorkerState.READY)
        return worker_pb2.SetDrainingResponse()

    async def SwitchRole(self, request: worker_pb2.SwitchRoleRequest, context: Any) -> worker_pb2.SwitchRoleResponse:
        self.wanted_roles.append(wire.role_from_proto(request.role))
        return worker_pb2.SwitchRoleResponse()

    async def _register(self, address: str) -> None:
        async with open_channel(address, self.credentials.tls) as channel:
            metadata = self.credentials.metadata()
            call = worker_pb2_grpc.RegistryStub(channel).Register(self._messages(), metadata=metadata)
            status = FirstStatus(call)
            try:
                async for _ in call:
                    self.registered.set()
            except grpc.aio.AioRpcError:
                raise await status.wait() from None

    async def _messages(self) -> AsyncIterator[worker_pb2.RegisterRequest]:
        yield worker_pb2.RegisterRequest(record=wire.worker_to_proto(self.info))
        while True:
            yield await self._beats.get()

    async def leave(self) -> None:
        """End the registration; the server goes on."""
        if self._registration is not None:
            self._registration.cancel()
            await asyncio.gather(self._registration, return_exceptions=True)

    async def kill(self) -> None:
        """Die as a killed process does."""
        await asyncio.gather(self.leave(), self.server.stop(0))


@dataclass
class DecodeScript:
    """How one sequence goes. Counts are tokens this worker sends for it before it happens."""

    refuse: SequenceFailure | None = None
    fail_after: tuple[int, SequenceFailure] | None = None
    break_link_after: int | None = None
    ready_tokens: int = 0
    logprob: float | None = None


@dataclass(eq=False)
class _Session:
    outbox: "asyncio.Queue[decode_pb2.AttachResponse | None]" = field(default_factory=asyncio.Queue)
    tasks: dict[tuple[str, int], "asyncio.Task[None]"] = field(default_factory=dict)

    async def watch(self, key: tuple[str, int], run: Coroutine[Any, Any, None]) -> None:
        """Forget a sequence when it ends."""
        try:
            await run
        finally:
            del self.tasks[key]


class _SharedPrompt:
    """A prompt whose KV forks wait for."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()
        self._is_there = False

    def done(self) -> None:
        self._is_there = True
        self._ended.set()

    async def computed_by(self, run: Coroutine[Any, Any, None]) -> None:
        """Once `run` has ended there is nothing to wait for."""
        try:
            await run
        finally:
            self._ended.set()

    async def is_there(self) -> bool:
        """False if it has ended before."""
        await self._ended.wait()
        return self._is_there


class FakeDecodeWorker(FakeWorker, decode_pb2_grpc.DecodeServicer):
    """Decodes. `by_address` stands for the network that KV takes from prefill workers."""

    role = WorkerRole.DECODE
    by_address: ClassVar[dict[str, "FakeDecodeWorker"]] = {}

    def __init__(self, worker_id: str, **identity: Any) -> None:
        super().__init__(worker_id, **identity)
        self.scripts: list[DecodeScript] = []
        self.canary = DecodeScript()
        self.pace_s = 0.0
        self.most_running = 0
        self.gate = Gate()
        self.started = Journal()
        self.aborted = Journal()
        self.forked = Journal()
        self.sent = Journal()
        self.commits: dict[str, asyncio.Future[int]] = {}
        self._sessions: set[_Session] = set()

    def _add_servicer(self) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, self.server.grpc)

    async def start(self) -> None:
        await super().start()
        self.by_address[self.server.address] = self

    @property
    def num_running(self) -> int:  # type: ignore[override]
        return sum(len(session.tasks) for session in self._sessions)

    def break_links(self) -> None:
        """End all Attach streams with an error."""
        for session in self._sessions:
            session.outbox.put_nowait(None)

    def end_links(self) -> None:
        """End all Attach streams in order, as a worker that has drained."""
        for session in self._sessions:
            session.outbox.put_nowait(decode_pb2.AttachResponse(ended=decode_pb2.AttachEnded()))

    def commit(self, transfer_id: str, token_id: int) -> None:
        """KV and first token have arrived."""
        if transfer_id not in self.commits:
            raise TransferFailed("no reservation")
        self.commits[transfer_id].set_result(token_id)

    async def Attach(
        self, request_iterator: AsyncIterator[decode_pb2.AttachRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.AttachResponse]:
        hello = await anext(aiter(request_iterator))
        if hello.hello.worker_incarnation != self.info.incarnation:
            raise WorkerLost("this worker has restarted")
        session = _Session()
        self._sessions.add(session)
        yield decode_pb2.AttachResponse(
            welcome=decode_pb2.AttachWelcome(worker_incarnation=hello.hello.worker_incarnation)
        )
        follower = asyncio.create_task(self._follow(session, request_iterator))
        try:
            while (event := await session.outbox.get()) is not None:
                yield event
                if event.HasField("ended"):
                    await follower
                    return
            raise WorkerLost("scripted break")
        finally:
            self._sessions.discard(session)
            follower.cancel()
            for task in list(session.tasks.values()):
                task.cancel()

    async def _follow(self, session: _Session, requests: AsyncIterator[decode_pb2.AttachRequest]) -> None:
        async for request in requests:
            if request.WhichOneof("command") == "start":
                model = FakeModel(wire.spec_from_proto(request.start.sequence))
                key = model.request.key
                prompt = _SharedPrompt()
                run = self._run(session, model, request.start.transfer_id, self._script(model.request), prompt)
                session.tasks[key] = asyncio.create_task(session.watch(key, prompt.computed_by(run)))
                for fork in model.request.forked():
                    fork_run = self._run_fork(session, FakeModel(fork), prompt)
                    fork_key = fork.key
                    session.tasks[fork_key] = asyncio.create_task(session.watch(fork_key, fork_run))
                self.most_running = max(self.most_running, self.num_running)
                (self.canaries if is_canary(model.request) else self.started).add(request.start)
            else:
                key = (request.abort.request_id, request.abort.attempt)
                if key in session.tasks:
                    session.tasks[key].cancel()
                self.aborted.add(key)

    def _script(self, spec: SequenceSpec) -> DecodeScript:
        if is_canary(spec):
            return self.canary
        return self.scripts.pop(0) if self.scripts else DecodeScript()

    async def _run_fork(self, session: _Session, model: FakeModel, prompt: "_SharedPrompt") -> None:
        key = model.request.key
        if not await prompt.is_there():
            return self._fail(session, key, SequenceFailure.NO_CAPACITY)
        self.forked.add(key)
        return await self._generate(session, model, self._script(model.request), is_first=True)

    async def _run(
        self, session: _Session, model: FakeModel, transfer_id: str, script: DecodeScript, prompt: "_SharedPrompt"
    ) -> None:
        key = model.request.key
        if script.refuse is not None:
            return self._fail(session, key, script.refuse)
        if transfer_id:
            self.commits[transfer_id] = asyncio.get_running_loop().create_future()
            reserved = decode_pb2.SequenceReserved(request_id=key[0], attempt=key[1], ready_tokens=script.ready_tokens)
            session.outbox.put_nowait(decode_pb2.AttachResponse(reserved=reserved))
            try:
                goes_on = model.take_over(await self.commits[transfer_id])
            finally:
                del self.commits[transfer_id]
            prompt.done()
            if not goes_on:
                return None
        else:
            prompt.done()
        return await self._generate(session, model, script, is_first=not transfer_id)

    async def _generate(self, session: _Session, model: FakeModel, script: DecodeScript, *, is_first: bool) -> None:
        key = model.request.key
        num_sent = 0
        while True:
            if script.fail_after is not None and num_sent == script.fail_after[0]:
                return self._fail(session, key, script.fail_after[1])
            if script.break_link_after == num_sent:
                session.outbox.put_nowait(None)
                return None
            if not is_canary(model.request):
                await self.gate.passed()
            if self.pace_s:
                await asyncio.sleep(self.pace_s)
            output = model.step(with_prompt=is_first and num_sent == 0)
            if script.logprob is not None:
                output = output._replace(tokens=tuple(t._replace(logprob=script.logprob) for t in output.tokens))
            for part in output.in_parts():
                step = decode_pb2.StepOutputs(outputs=[wire.output_to_proto(part)])
                session.outbox.put_nowait(decode_pb2.AttachResponse(step=step))
            num_sent += 1
            if not is_canary(model.request):
                self.sent.add((key, output.first_index))
            if output.finish_reason is not None:
                return None

    def _fail(self, session: _Session, key: tuple[str, int], reason: SequenceFailure) -> None:
        failed = decode_pb2.SequenceFailed(
            request_id=key[0], attempt=key[1], reason=wire.failure_to_proto(reason), detail="scripted"
        )
        session.outbox.put_nowait(decode_pb2.AttachResponse(failed=failed))


@dataclass
class PrefillScript:
    """The behaviour of one prefill call."""

    refuse: MeshError | None = None
    fail_before_first: Exception | None = None
    fail_after_first: MeshError | None = None
    fail_after_commit: MeshError | None = None
    hold: asyncio.Event | None = None
    first_token_after: int = 0  # tokens the decode worker sends before the router hears of the first one
    cached_tokens: int = 0


class FakePrefillWorker(FakeWorker, prefill_pb2_grpc.PrefillServicer):
    """A prefill worker that computes nothing and follows a script."""

    role = WorkerRole.PREFILL

    def __init__(self, worker_id: str, **identity: Any) -> None:
        super().__init__(worker_id, **identity)
        self.scripts: list[PrefillScript] = []
        self.canary = PrefillScript()
        self.calls = Journal()
        self.cancelled = Journal()
        self.num_running = 0

    def _add_servicer(self) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, self.server.grpc)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        if is_canary(wire.spec_from_proto(request.sequence)):
            self.canaries.add(request)
            async for response in self._run(request, self.canary):
                yield response
            return
        script = self.scripts.pop(0) if self.scripts else PrefillScript()
        self.calls.add(request)
        self.num_running += 1
        try:
            async for response in self._run(request, script):
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.add((request.sequence.request_id, request.sequence.attempt))
            raise
        finally:
            self.num_running -= 1

    async def _run(
        self, request: prefill_pb2.PrefillRequest, script: PrefillScript
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        _raise(script.refuse)
        yield prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted())
        if script.hold is not None:
            await script.hold.wait()
        _raise(script.fail_before_first)
        output = FakeModel(wire.spec_from_proto(request.sequence)).step(
            with_prompt=True, cached_tokens=script.cached_tokens
        )
        *parts, first = (
            prefill_pb2.PrefillResponse(first_token=wire.output_to_proto(part)) for part in output.in_parts()
        )
        for part in parts:
            yield part
        if output.finish_reason is not None and not request.sequence.forks:
            yield first
            return
        if not script.first_token_after:
            yield first
        _raise(script.fail_after_first)
        decode = FakeDecodeWorker.by_address[request.destination.address]
        decode.commit(request.destination.transfer_id, output.tokens[0].id)
        if script.first_token_after:
            key = output.key
            await decode.sent.wait_for((key, output.first_index + script.first_token_after))
            yield first
        _raise(script.fail_after_commit)
        yield prefill_pb2.PrefillResponse(finished=prefill_pb2.TransferFinished(bytes=1, duration_ms=0.1))


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
