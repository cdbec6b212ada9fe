"""The link: one stream to each decode worker, over the channel to this run of the worker (connections.py).

    hello ─▶ welcome ─▶ start/abort ... ◀─ reserved, step outputs, failed ... ─▶ broken: every attempt on it has failed

A link carries commands down and the tokens of all sequences up. `DecodeLinks` opens a link when a worker joins, closes
it when the worker leaves, and opens it again after a break. When hundreds join at once, links wait for their turn, in
the order of the table, so that the first workers serve before the others are linked. One reader per link hands messages
to the attempts by a plain call: no task, timer or queue per token. Messages for attempts that have ended are dropped.
The stream has no deadline and lives as long as the worker; keepalive and the registry's heartbeats detect its end.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc
import structlog

from mesh import wire
from mesh.domain.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MeshError,
    ModelFailed,
    SequencePreempted,
    TransferCorrupt,
    TransferFailed,
    WorkerBusy,
    WorkerDraining,
    WorkerLost,
)
from mesh.domain.request import SequenceSpec
from mesh.domain.tokens import SequenceFailure, SequenceKey, SequenceOutput
from mesh.domain.worker import WorkerInfo, WorkerRole
from mesh.tasks import backoff_s, cancel_all
from mesh.v1 import decode_pb2, decode_pb2_grpc
from router.workers.connections import Channels, RouterIdentity, responses_of
from router.workers.membership import Membership, WorkerView

log = structlog.get_logger(__name__)

_WELCOME_TIMEOUT_S = 5.0
_FIRST_RETRY_S = 1.0
_MAX_RETRY_S = 10.0
_MAX_OPENING = 64
"""Links that are opened at a time. A thousand that were all opened at once would all be late for the welcome."""
_MAX_TURN_S = 2.0
"""A worker that has not answered by then lets the next one have its turn, and may still answer."""

_ERRORS: dict[SequenceFailure, type[MeshError]] = {
    SequenceFailure.NO_CAPACITY: WorkerBusy,
    SequenceFailure.PREEMPTED: SequencePreempted,
    SequenceFailure.KV_REFUSED: TransferCorrupt,
    SequenceFailure.KV_MISSING: TransferFailed,
    SequenceFailure.DRAINING: WorkerDraining,
    SequenceFailure.INTERNAL: WorkerLost,
    SequenceFailure.DEADLINE: DeadlineExceeded,
}


class SequenceListener(Protocol):
    """Receives the events of one attempt. Called on the event loop; must not block."""

    def on_reserved(self, ready_tokens: int) -> None:
        """The worker holds the blocks, and the KV of this many leading tokens is already in its prefix cache."""
        ...

    def on_output(self, output: SequenceOutput) -> None:
        """The worker has sampled new tokens, or the sequence has finished."""
        ...

    def on_failed(self, error: MeshError) -> None:
        """The worker has given up the attempt, or is lost. No further event follows."""
        ...


class Link(Protocol):
    """Starts and aborts attempts at one run of a decode worker. Plug point: DecodeLink, and modelled workers
    (tandem_cli/simulation/workers.py)."""

    def start(
        self,
        spec: SequenceSpec,
        transfer_id: str,
        listener: SequenceListener,
        fork_listeners: Sequence[SequenceListener] = (),
    ) -> None:
        """Start an attempt and its forks. Each listener gets its own events until failure, finish or abort."""
        ...

    def abort(self, key: SequenceKey) -> None:
        """Abort an attempt, if the worker has not ended it. Its listener gets no further events."""
        ...


class Links(Protocol):
    """The links to all decode workers. Plug point: DecodeLinks, and modelled workers
    (tandem_cli/simulation/workers.py)."""

    def find(self, info: WorkerInfo) -> Link | None:
        """Return the working link to this run of a worker, or None."""
        ...

    def unreachable(self, views: Iterable[WorkerView]) -> frozenset[str]:
        """Return the incarnations of decode workers without a working link: they get no requests."""
        ...


class DecodeLink:
    """The link to one run of a worker. Call `run` once; the link is dead when `run` returns."""

    def __init__(self, info: WorkerInfo, channel: grpc.aio.Channel, identity: RouterIdentity) -> None:
        self.info = info
        self.is_up = False
        self.has_ended = False
        """The worker has ended the stream in order, because it stops or changes its role."""
        self._stub = decode_pb2_grpc.DecodeStub(channel)
        self._identity = identity
        self._listeners: dict[SequenceKey, SequenceListener] = {}
        self._commands: asyncio.Queue[decode_pb2.AttachRequest | None] = asyncio.Queue()

    async def run(self, on_up: Callable[[], None]) -> None:
        """Attach, and deliver messages until the worker ends the stream, or it breaks. Raises the error of a break;
        cancel to close the link."""
        call = self._stub.Attach(metadata=self._identity.metadata)
        # Not by grpc.aio's own task, which waits for ever if the call fails to connect while this one is cancelled.
        writing = asyncio.create_task(self._write_commands(call))
        responses = responses_of(call)
        try:
            await self._wait_welcome(responses)
            self.is_up = True
            on_up()
            async for response in responses:
                self._deliver(response)
            if not self.has_ended:
                raise WorkerLost("the worker has ended the stream")
        finally:
            self.is_up = False
            writing.cancel()
            await responses.aclose()
            listeners, self._listeners = self._listeners, {}
            for listener in listeners.values():
                if self.has_ended:
                    listener.on_failed(WorkerDraining("the decode worker takes no work"))
                else:
                    listener.on_failed(WorkerLost("the decode worker is lost"))

    def start(
        self,
        spec: SequenceSpec,
        transfer_id: str,
        listener: SequenceListener,
        fork_listeners: Sequence[SequenceListener] = (),
    ) -> None:
        self._listeners[spec.key] = listener
        for fork, fork_listener in zip(spec.forks, fork_listeners, strict=True):
            self._listeners[fork.key] = fork_listener
        start = decode_pb2.StartSequence(sequence=wire.spec_to_proto(spec), transfer_id=transfer_id)
        self._commands.put_nowait(decode_pb2.AttachRequest(start=start))

    def abort(self, key: SequenceKey) -> None:
        if self._listeners.pop(key, None) is not None and self.is_up:
            abort = decode_pb2.AbortSequence(request_id=key[0], attempt=key[1])
            self._commands.put_nowait(decode_pb2.AttachRequest(abort=abort))

    async def _write_commands(self, call: Any) -> None:
        """Write hello and commands, until None. Without commands the link is useless: an error here ends the call."""
        hello = decode_pb2.AttachHello(router_id=self._identity.router_id, worker_incarnation=self.info.incarnation)
        try:
            await call.write(decode_pb2.AttachRequest(hello=hello))
            while (command := await self._commands.get()) is not None:
                await call.write(command)
            await call.done_writing()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            pass  # the call has ended, and its responses say how
        except BaseException:
            call.cancel()
            raise

    async def _wait_welcome(self, responses: AsyncIterator[decode_pb2.AttachResponse]) -> None:
        try:
            async with asyncio.timeout(_WELCOME_TIMEOUT_S):
                response = await anext(responses, None)
        except TimeoutError as error:
            raise WorkerLost(f"the worker did not answer within {_WELCOME_TIMEOUT_S:g} s") from error
        if response is None or response.welcome.worker_incarnation != self.info.incarnation:
            raise WorkerLost("another run of the worker answers at its address")

    def _deliver(self, response: decode_pb2.AttachResponse) -> None:
        kind = response.WhichOneof("event")
        if kind == "step":
            for message in response.step.outputs:
                self._deliver_output(wire.output_from_proto(message))
        elif kind == "reserved":
            listener = self._listeners.get((response.reserved.request_id, response.reserved.attempt))
            if listener is not None:
                listener.on_reserved(response.reserved.ready_tokens)
        elif kind == "failed":
            listener = self._listeners.pop((response.failed.request_id, response.failed.attempt), None)
            if listener is not None:
                listener.on_failed(_error_of(response.failed))
        elif kind == "ended":
            self.is_up, self.has_ended = False, True
            self._commands.put_nowait(None)

    def _deliver_output(self, output: SequenceOutput) -> None:
        listener = self._listeners.get(output.key)
        if listener is None:
            return
        if output.finish_reason is not None:
            del self._listeners[output.key]
        listener.on_output(output)


def _error_of(failed: decode_pb2.SequenceFailed) -> MeshError:
    reason = wire.failure_from_proto(failed.reason)
    if reason in (SequenceFailure.TOO_LARGE, SequenceFailure.REFUSED):
        return InvalidRequest(failed.detail)
    if reason is SequenceFailure.MODEL_FAILED:
        return ModelFailed(failed.detail)
    return _ERRORS[reason](f"the decode worker gave up the sequence: {reason.value}: {failed.detail}")


class DecodeLinks:
    """One link per decode worker's current incarnation. `on_change` is called when a link comes up or breaks."""

    def __init__(
        self, membership: Membership, channels: Channels, identity: RouterIdentity, on_change: Callable[[], None]
    ) -> None:
        self._membership = membership
        self._channels = channels
        self._identity = identity
        self._on_change = on_change
        self._links: dict[str, DecodeLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_failures: Counter[str] = Counter()  # breaks in a row, by incarnation
        self._turns = asyncio.Semaphore(_MAX_OPENING)  # taken in the order of requests

    def find(self, info: WorkerInfo) -> DecodeLink | None:
        link = self._links.get(info.incarnation)
        return link if link is not None and link.is_up else None

    def unreachable(self, views: Iterable[WorkerView]) -> frozenset[str]:
        return frozenset(
            view.info.incarnation
            for view in views
            if view.info.role is WorkerRole.DECODE and self.find(view.info) is None
        )

    def reconcile(self) -> None:
        """Open links to workers that are in the table, and close the others."""
        views = self._membership.views()
        present = {
            view.info.incarnation: view.info
            for view in views
            if view.info.role is WorkerRole.DECODE and not view.state.is_gone
        }
        for incarnation in self._num_failures.keys() - {view.info.incarnation for view in views}:
            del self._num_failures[incarnation]
        for incarnation in self._tasks.keys() - present.keys():
            self._tasks.pop(incarnation).cancel()
        for incarnation, info in present.items():
            if incarnation not in self._tasks:
                self._tasks[incarnation] = asyncio.get_running_loop().create_task(self._keep(info))

    async def close(self) -> None:
        """Close all links; the attempts on them fail."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        await cancel_all(tasks)

    async def _keep(self, info: WorkerInfo) -> None:
        """Keep one link open. If it breaks, the worker counts as lost until its next heartbeat. One that has ended it
        tells the registry what becomes of it."""
        num_failures = self._num_failures[info.incarnation]
        await asyncio.sleep(backoff_s(num_failures, first_s=_FIRST_RETRY_S, max_s=_MAX_RETRY_S))
        async with self._turn() as end_turn:
            link = DecodeLink(info, self._channels.get(info), self._identity)
            self._links[info.incarnation] = link

            def on_up() -> None:
                end_turn()
                self._num_failures.pop(info.incarnation, None)
                self._on_change()

            try:
                await link.run(on_up)
            except MeshError as error:
                if not link.has_ended:
                    log.warning("decode link broken", worker=info.worker_id, address=info.address, error=str(error))
            except Exception:
                log.exception("decode link failed", worker=info.worker_id)
            finally:
                if self._links.get(info.incarnation) is link:
                    del self._links[info.incarnation]
        self._on_broken(info, is_lost=not link.has_ended)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[Callable[[], None]]:
        """Wait until few enough links are being opened. Yields a function that ends this link's turn; so do its time
        limit and the end of the context."""
        await self._turns.acquire()
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._turns.release()

        limit = asyncio.get_running_loop().call_later(_MAX_TURN_S, end)
        try:
            yield end
        finally:
            limit.cancel()
            end()

    def _on_broken(self, info: WorkerInfo, *, is_lost: bool) -> None:
        if self._tasks.get(info.incarnation) is not asyncio.current_task():
            return  # reconcile has already replaced this task
        del self._tasks[info.incarnation]
        self._num_failures[info.incarnation] += 1
        if is_lost:
            self._membership.lose(info)
        self._on_change()
