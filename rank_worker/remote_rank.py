"""A rank that shares no memory with its leader, from dialling it until the end of one of the two.

    join ─▶ load weights ─▶ allocate KV ─▶ meet the other ranks ─▶ execute messages, until the leader ends the call

The event loop has the connection; a thread of its own loads and computes. The process ends with the connection,
whatever the thread does: 0 if the worker has stopped, 1 if it is lost, 2 if something must be fixed here.
"""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import grpc
import structlog
import torch

from engine.kv.cache import KVCache
from engine.loading.resolve import kv_layout, resolve
from engine.ranks.collectives import NoteStore
from engine.ranks.messages import BlockCopy, StepMessage, read_settings
from engine.ranks.remote import OwnMemoryRank, require_remote
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import (
    ConfigurationError,
    InvalidRequest,
    MeshError,
    Overloaded,
    Replayable,
    Unauthenticated,
    WorkerLost,
)
from mesh.logs import flush_outputs
from mesh.metrics import new_registry, serving_metrics
from mesh.parent import die_with
from mesh.process import ending_if_stuck, keep_freed_memory, tell_parent, until_stopped
from mesh.rpc.channel import open_channel
from mesh.rpc.status import error_from_rpc
from mesh.tasks import Backoff, call_on
from mesh.v1 import rank_pb2, rank_pb2_grpc
from rank_worker.kv import RankKV
from rank_worker.settings import RankSettings
from worker.load_watch import LoadProgress, limited
from worker.ranks.server import RANK_KEEPALIVE_MS, versions

T = TypeVar("T")

log = structlog.get_logger(__name__)

_VERDICT_S = 20.0
"""Limit on waiting for the leader to say which rank is lost. Longer than it takes to notice a machine that vanished."""
_CLOSE_S = 0.5
_MAX_REASON_CHARS = 4000


async def serve(settings: RankSettings) -> None:
    """Join the leader and serve until one of the two ends; then end the process. Raises MeshError if the rank cannot
    join.
    """
    keep_freed_memory()
    structlog.contextvars.bind_contextvars(rank=settings.rank)
    if settings.parent:
        die_with(settings.parent)
    async with serving_metrics(new_registry(), settings):
        stopped = asyncio.create_task(_until_stopped(settings))
        joining = asyncio.create_task(_dial(settings))
        await asyncio.wait([stopped, joining], return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():
            if (error := stopped.exception()) is not None:
                log.critical("unexpected error, exiting", exc_info=error)
            flush_outputs()
            os._exit(0 if error is None else 1)  # a thread may be downloading the model
        group = joining.result()
        tell_parent("joined", rank=settings.rank)
        joined = JoinedRank(group, settings)
        status = await joined.serve(stopped)
        await joined.close()
        flush_outputs()
        os._exit(status)  # the thread may be in the middle of a sum


async def _until_stopped(settings: RankSettings) -> None:
    """Return when this rank is asked to stop. A worker that has started it asks nobody: it ends it."""
    if not settings.parent:
        await until_stopped(settings, settings.watch_certificates)
        return
    async with ending_if_stuck(settings.stuck_exit_s):
        await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class JoinedGroup:
    """A rank's place in a group, and the calls by which it is held."""

    channel: grpc.aio.Channel
    call: Any
    setup: rank_pb2.RankSetup
    settings: RunnerSettings
    host: str


async def _dial(settings: RankSettings) -> JoinedGroup:
    """Join the leader, once it is there. Raises MeshError."""
    model_dir = await asyncio.to_thread(settings.source.locate)
    clock, backoff, reason = asyncio.get_running_loop().time, Backoff(0.1, 2.0, jitter=0.5), ""
    give_up_s = clock() + settings.leader_timeout_s
    while True:
        try:
            return await _join(settings, model_dir)
        except (Replayable, Overloaded) as error:
            if clock() > give_up_s:
                limit = f"leader_timeout_s {settings.leader_timeout_s:g}"
                raise WorkerLost(
                    f"rank {settings.rank} could not join {settings.leader} within {limit}: {error}"
                ) from None
            if str(error) != reason:
                reason = str(error)
                log.info("cannot join yet", leader=settings.leader, rank=settings.rank, reason=reason)
        except (Unauthenticated, InvalidRequest) as error:
            raise ConfigurationError(f"the leader {settings.leader} refuses this rank: {error}") from None
        await asyncio.sleep(backoff.next_s())


async def _join(settings: RankSettings, model_dir: Path) -> JoinedGroup:
    credentials = settings.leader_credentials()
    host, port = settings.leader_address
    channel = open_channel(f"{host}:{port}", credentials.tls, own_connection=True, keepalive_ms=RANK_KEEPALIVE_MS)
    try:
        call: Any = rank_pb2_grpc.RanksStub(channel).Join(metadata=credentials.metadata())
        hello = rank_pb2.RankHello(rank=settings.rank, group_size=settings.group_size, versions=versions())
        setup = (await _exchange(call, rank_pb2.JoinRequest(hello=hello))).setup
        runner_settings, fingerprint = await asyncio.to_thread(_read_setup, setup, settings, model_dir)
        checked = rank_pb2.RankChecked(model_fingerprint=fingerprint)
        admitted = (await _exchange(call, rank_pb2.JoinRequest(checked=checked))).admitted
        return JoinedGroup(channel, call, setup, runner_settings, admitted.host)
    except BaseException:
        await channel.close()
        raise


async def _exchange(call: Any, request: rank_pb2.JoinRequest) -> rank_pb2.JoinResponse:
    """Send a message and return the answer. Raises MeshError."""
    try:
        # If the call has ended, `read` says why, or "Internal error from Core" (github.com/grpc/grpc/issues/36066). The
        # latter counts as a lost leader, and the next attempt brings the reason.
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await call.write(request)
        response: rank_pb2.JoinResponse = await call.read()
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    if response is grpc.aio.EOF:
        raise WorkerLost("the leader has ended the call")
    return response


def _read_setup(setup: rank_pb2.RankSetup, settings: RankSettings, model_dir: Path) -> tuple[RunnerSettings, str]:
    """The settings of the group with what is the rank's own, and the fingerprint of the rank's checkpoint."""
    shared = read_settings(json.loads(setup.settings) | {"model_dir": str(model_dir)})
    device = settings.device or shared.device.partition(":")[0]
    resolved, config = resolve(replace(shared, kv_memory=settings.kv_memory(), device=device))
    return resolved, kv_layout(require_remote(resolved, config), resolved).model_fingerprint


class JoinedRank:
    """A rank that has joined. The thread gets messages in order: the number of blocks, then steps and copies."""

    def __init__(self, group: JoinedGroup, settings: RankSettings) -> None:
        self._group = group
        self._settings = settings
        self._metadata = settings.leader_credentials().metadata()
        self._stub = rank_pb2_grpc.RanksStub(group.channel)
        self._loop = asyncio.get_running_loop()
        self._messages: SimpleQueue[int | StepMessage | BlockCopy] = SimpleQueue()
        self._writing = asyncio.Lock()
        self._failed: asyncio.Future[Exception] = self._loop.create_future()
        self._is_ready = False
        self._kv: RankKV | None = None

    async def close(self) -> None:
        """End transfers of KV, so that they leave no memory behind."""
        if self._kv is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._kv.close()

    async def serve(self, stopped: asyncio.Task[None]) -> int:
        """Serve until the leader ends the call, or something fails here. Returns the exit status."""
        reading = asyncio.create_task(self._read())
        threading.Thread(target=self._run, name="rank", daemon=True).start()
        ends: list[asyncio.Future[Any]] = [reading, self._failed]
        await asyncio.wait([*ends, stopped], return_when=asyncio.FIRST_COMPLETED)
        if stopped.done() and isinstance(error := stopped.exception(), Exception):
            return await self._fail(error, reading)
        if stopped.done() and not self._is_ready:
            return 0  # the leader serves nobody yet
        if stopped.done() and not reading.done():
            log.info("asked to stop, waiting for the leader")
            await self._write(rank_pb2.JoinRequest(leaving=rank_pb2.RankLeaving()))
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            return await self._fail(self._failed.result(), reading)
        return reading.result()

    async def _fail(self, error: Exception, reading: asyncio.Task[int]) -> int:
        """Tell the leader why this rank ends, unless it suffers from the end of another, which the leader names."""
        if isinstance(error, WorkerLost):
            await asyncio.wait([reading], timeout=_VERDICT_S)
            if reading.done():
                return reading.result()
            log.critical("the worker is lost, exiting", reason=str(error))
            return 1
        reason, is_configuration = str(error), isinstance(error, ConfigurationError)
        if isinstance(error, MeshError):
            log.critical("the rank cannot serve, exiting", reason=reason)
        else:
            log.critical("unexpected error, exiting", exc_info=error)
            reason = f"{type(error).__name__}: {reason}; its log has the details"
        failed = rank_pb2.RankFailed(reason=reason[:_MAX_REASON_CHARS], is_configuration=is_configuration)
        await self._write(rank_pb2.JoinRequest(failed=failed))
        await asyncio.wait([reading], timeout=_VERDICT_S)
        return 2 if is_configuration else 1

    async def _read(self) -> int:
        """Hand the leader's messages to the thread. Returns the exit status when the call has ended."""
        try:
            while (response := await self._group.call.read()) is not grpc.aio.EOF:
                self._messages.put(_message(response))
        except grpc.aio.AioRpcError as error:
            log.critical("the leader is lost, exiting", reason=str(error_from_rpc(error)))
            return 1
        log.info("the leader has stopped, exiting")
        return 0 if self._is_ready else 1

    async def _write(self, request: rank_pb2.JoinRequest) -> None:
        """Send a message; nothing if the call has ended, which `_read` notices."""
        async with self._writing:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._group.call.write(request)

    async def _hold_kv(self, cache: KVCache) -> None:
        """Follow the leader's orders about KV, until the call ends."""
        host, port = self._settings.leader_address
        tls = self._settings.leader_credentials().tls
        error: Exception = WorkerLost("the leader has ended the call about KV")
        try:
            async with open_channel(
                f"{host}:{port}", tls, own_connection=True, keepalive_ms=RANK_KEEPALIVE_MS
            ) as channel:
                call: Any = rank_pb2_grpc.RanksStub(channel).HoldKv(metadata=self._metadata)
                hello = rank_pb2.KvReport(rank=self._settings.rank, group=self._group.setup.group)
                await call.write(hello)
                reports: asyncio.Queue[rank_pb2.KvReport] = asyncio.Queue()
                self._kv = RankKV(cache, self._settings, self._group.host, reports.put_nowait)
                async with asyncio.TaskGroup() as tasks:
                    writing = tasks.create_task(_write_all(call, reports))
                    while (order := await call.read()) is not grpc.aio.EOF:
                        self._kv.handle(order)
                    writing.cancel()
        except* (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        except* Exception as failures:
            error = failures.exceptions[0]
        self._set_failed(error)

    def _run(self) -> None:
        """Runs on a thread of its own until the rank ends."""
        try:
            self._load_and_execute()
        except Exception as error:
            call_on(self._loop, self._set_failed, error)

    def _load_and_execute(self) -> None:
        settings = self._group.settings
        torch.set_num_threads(self._settings.num_threads or len(os.sched_getaffinity(0)))
        progress = _RankProgress(lambda: self._report(rank_pb2.JoinRequest(loading=rank_pb2.RankLoading())))
        notes = NoteStore(self._put_note, self._get_note)
        with limited(None, progress):
            own_rank = OwnMemoryRank(settings, self._settings.rank, notes, progress)
        self._report(rank_pb2.JoinRequest(loaded=rank_pb2.RankLoaded(num_blocks=own_rank.fitting_blocks())))
        num_blocks = self._messages.get()
        assert isinstance(num_blocks, int)
        cache = own_rank.allocate(num_blocks)
        asyncio.run_coroutine_threadsafe(self._hold_kv(cache), self._loop)
        own_rank.rank.connect(self._group.host, shares_memory=False)
        execute = own_rank.executing(cache)
        self._is_ready = True
        self._report(rank_pb2.JoinRequest(ready=rank_pb2.RankReady()))
        log.info("rank ready", rank=self._settings.rank, num_blocks=num_blocks, threads=torch.get_num_threads())
        tell_parent("ready")
        while True:
            message = self._messages.get()
            assert not isinstance(message, int)
            execute(message)

    def _set_failed(self, error: Exception) -> None:
        if not self._failed.done():
            self._failed.set_result(error)

    def _report(self, request: rank_pb2.JoinRequest) -> None:
        self._await(self._write(request))

    def _put_note(self, key: str, value: bytes) -> None:
        request = rank_pb2.PutNoteRequest(key=key, value=value, group=self._group.setup.group)
        self._await(self._ask(self._stub.PutNote, request))

    def _get_note(self, key: str) -> bytes:
        request = rank_pb2.GetNoteRequest(key=key, group=self._group.setup.group)
        response: rank_pb2.GetNoteResponse = self._await(self._ask(self._stub.GetNote, request))
        return response.value

    async def _ask(self, method: Any, request: Any) -> Any:
        """Call the leader. A status becomes its MeshError."""
        try:
            return await method(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the event loop, for the thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


class _RankProgress(LoadProgress):
    """Tells the leader, which waits for this rank, that its loading makes progress."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def checked(self, *, makes_progress: bool) -> None:
        if makes_progress:
            self._tell()


def _message(response: rank_pb2.JoinResponse) -> int | StepMessage | BlockCopy:
    """Raises ValueError for a message that a rank does not expect."""
    match response.WhichOneof("message"):
        case "step":
            step = response.step
            return StepMessage(step.command, step.token_ids, step.positions, step.sequences)
        case "copy":
            return BlockCopy(response.copy.source, response.copy.target)
        case "allocate":
            return response.allocate.num_blocks
        case other:
            raise ValueError(f"the leader sent {other}")


async def _write_all(call: Any, reports: "asyncio.Queue[rank_pb2.KvReport]") -> None:
    while True:
        await call.write(await reports.get())
