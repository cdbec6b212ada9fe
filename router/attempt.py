"""One attempt of a choice: one dispatch to a decode worker and, unless that worker prefills itself, a prefill worker.

start on decode ─▶ reserved ─▶ prefill call ─▶ first token ─▶ transfer finished
                                                   └────▶ tokens from decode ─▶ finished
fork: started together with another attempt, whose prompt it shares ─▶ tokens from decode ─▶ finished
a failure ─▶ Replayable; in every case both workers are told to abort, and the reservation is released

The decode worker is reached over its link (workers/decode_link.py). The call to the prefill worker, PrefillClient,
lasts while that worker computes the prompt and sends its KV.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import grpc
import structlog

from mesh import wire
from mesh.domain.errors import (
    AttemptsFailed,
    DeadlineExceeded,
    InvalidRequest,
    MeshError,
    ModelFailed,
    ReceiverLost,
    Replayable,
    TransferCorrupt,
    TransferFailed,
    WorkerLost,
)
from mesh.domain.request import SequenceSpec, mint_id
from mesh.domain.tokens import SequenceOutput
from mesh.domain.worker import WorkerInfo
from mesh.rpc.status import ERROR_KEY
from mesh.v1 import prefill_pb2, prefill_pb2_grpc
from router.admission.in_flight import CapacityReservation
from router.choice import Choice
from router.timeline import Timeline
from router.workers.connections import Caller, Channels, responses_of
from router.workers.decode_link import Link
from router.workers.membership import WorkerTable

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """The prompt's first step began `elapsed_s` ago; the KV of its first layers exists by now.

    This class, TransferFinished and KVDestination are the router's view; the prefill worker has its own classes of the
    same names (`prefill_worker/service.py`), because neither imports the other.
    """

    elapsed_s: float


@dataclass(frozen=True, slots=True)
class TransferFinished:
    """The decode worker has all KV.

    `duration_s`: since the transfer was opened; None if the worker does not report it.
    """

    num_bytes: int
    duration_s: float | None


PrefillEvent = PrefillStarted | SequenceOutput | TransferFinished


@dataclass(frozen=True, slots=True)
class KVDestination:
    """The destination of a prompt's KV: blocks that a decode worker holds under `transfer_id`."""

    decode: WorkerInfo
    transfer_id: str
    ready_tokens: int


class PrefillCaller(Protocol):
    """Calls prefill workers. Plug point: PrefillClient, and modelled workers
    (tandem_cli/simulation/workers.py)."""

    def run(
        self, worker: WorkerInfo, request: SequenceSpec, destination: KVDestination
    ) -> AsyncGenerator[PrefillEvent, None]:
        """Yield the events of one prefill. Closing the generator cancels it.

        Raises Replayable, InvalidRequest, ModelFailed, or DeadlineExceeded if the request's own deadline has passed.
        """
        ...


class PrefillClient:
    """Calls prefill workers; a call fails after `timeout_s`."""

    def __init__(self, table: WorkerTable, channels: Channels, caller: Caller, *, timeout_s: float) -> None:
        self._table = table
        self._channels = channels
        self._caller = caller
        self._timeout_s = timeout_s

    async def run(
        self, worker: WorkerInfo, request: SequenceSpec, destination: KVDestination
    ) -> AsyncGenerator[PrefillEvent, None]:
        stub = prefill_pb2_grpc.PrefillStub(self._channels.get(worker))
        time_left_s = self._timeout_s if request.time_left_s is None else request.time_left_s
        call = stub.Prefill(
            _message(request, destination),
            timeout=min(self._timeout_s, time_left_s),
            metadata=self._caller.metadata,
        )
        try:
            async with aclosing(responses_of(call)) as responses:
                async for response in responses:
                    event = _event(response)
                    if event is not None:
                        yield event
        except DeadlineExceeded as error:
            if request.time_left_s is not None and request.time_left_s <= self._timeout_s:
                raise
            raise self._error_for_request(worker, error) from error
        except MeshError as error:
            raise self._error_for_request(worker, error) from error

    def _error_for_request(self, worker: WorkerInfo, error: MeshError) -> MeshError:
        """Return the error that the failed call means for the request."""
        if _is_too_large(error):  # on any worker: another attempt would compute the prompt in vain
            return AttemptsFailed(f"a message about the prompt is too large: {error}")
        if _is_unreachable(error):
            self._table.lose(worker.worker_id, worker.incarnation)
            return error
        is_internal = isinstance(error, WorkerLost)
        if isinstance(error, Replayable | InvalidRequest | ModelFailed) and not is_internal:
            return error
        log.warning("prefill failed", worker=worker.worker_id, error=str(error), kind=type(error).__name__)
        # An error about settings or the timeout may be due to either end, and is not the client's fault: replay.
        return error if is_internal else TransferFailed(f"the prefill worker ended the call: {error}")


def _is_unreachable(error: MeshError) -> bool:
    """True if the connection failed, or was closed because the worker is lost.

    An error that the worker itself raised carries its name in the metadata.
    """
    cause = error.__cause__
    if not isinstance(cause, grpc.aio.AioRpcError):
        return isinstance(error, WorkerLost)
    if cause.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    return ERROR_KEY not in dict(cause.trailing_metadata() or ())


def _is_too_large(error: MeshError) -> bool:
    """True if gRPC refused a message for its size; such an error carries no name in the metadata."""
    cause = error.__cause__
    return (
        isinstance(cause, grpc.aio.AioRpcError)
        and cause.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        and ERROR_KEY not in dict(cause.trailing_metadata() or ())
    )


def _message(request: SequenceSpec, destination: KVDestination) -> prefill_pb2.PrefillRequest:
    proto = prefill_pb2.KvDestination(
        address=destination.decode.address,
        worker_id=destination.decode.worker_id,
        incarnation=destination.decode.incarnation,
        transfer_id=destination.transfer_id,
        ready_tokens=destination.ready_tokens,
        ranks=wire.kv_endpoints_to_proto(destination.decode.kv_endpoints),
    )
    return prefill_pb2.PrefillRequest(sequence=wire.spec_to_proto(request), destination=proto)


def _event(response: prefill_pb2.PrefillResponse) -> PrefillEvent | None:
    kind = response.WhichOneof("event")
    if kind == "first_token":
        return wire.output_from_proto(response.first_token)
    if kind == "started":
        return PrefillStarted(response.started.elapsed_ms / 1000)
    if kind == "finished":
        finished = response.finished
        duration_s = finished.duration_ms / 1000 if finished.HasField("duration_ms") else None
        return TransferFinished(finished.bytes, duration_s)
    return None


@dataclass(frozen=True, slots=True)
class AttemptTimeouts:
    """Seconds an attempt waits for its workers: to reserve blocks, to compute the prompt, and between tokens."""

    reserve_s: float
    prefill_s: float
    stall_s: float


class Attempt:
    """One attempt at a choice, and the SequenceListener of its decode link. Call `run` once, or `close`.

    The attempt owns the reservation. `forks` are attempts that start together with this one and share its prompt.
    """

    def __init__(
        self,
        choice: Choice,
        request: SequenceSpec,
        reservation: CapacityReservation,
        *,
        link: Link,
        prefill_client: PrefillCaller,
        timeline: Timeline,
        timeouts: AttemptTimeouts,
        forks: "Sequence[Attempt]" = (),
    ) -> None:
        self.blamed: WorkerInfo | None = None
        """The worker that made the attempt fail."""
        self.placement = reservation.placement
        self.started_s = reservation.started_s
        self._choice = choice
        self._request = request
        self._reservation = reservation
        self._link = link
        self._timeline = timeline
        self._forks = forks
        self._prefill_client = prefill_client
        self._timeouts = timeouts
        self._prefill_call: asyncio.Task[None] | None = None
        self._has_first_token = False
        self._is_transferred = False
        self._is_decoding = False
        self._clock = asyncio.get_running_loop().time
        self._last_event_s = self._clock()
        self._reserved: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        reservation.on_abandoned = self._on_abandoned

    async def run(self) -> None:
        """Return when the choice is finished, or raise why it cannot be.

        Cleans up in every case, also when cancelled.
        """
        try:
            if not self._reservation.is_fork:
                await self._start()
            await self._wait_ended()
            if self._forks and self._prefill_call is not None:  # forks need its KV, even after one token
                await asyncio.wait({self._prefill_call})
        finally:
            self.close()

    async def _start(self) -> None:
        prefill = self.placement.prefill
        transfer_id = mint_id() if prefill is not None else ""
        self._link.start(self._request, transfer_id, self, self._forks)
        if prefill is None:
            self._timeline.mark("prefill_started")
            return
        ready_tokens = await self._wait_reserved()
        if ready_tokens is not None:
            self._start_prefill(prefill, KVDestination(self.placement.decode, transfer_id, ready_tokens))

    def on_reserved(self, ready_tokens: int) -> None:
        self._reservation.confirm()
        if self._request.attempt == 0:
            self._choice.note_cached(min(ready_tokens, self._request.num_prompt_tokens))
        if not self._reserved.done():
            self._reserved.set_result(ready_tokens)

    def on_output(self, output: SequenceOutput) -> None:
        if not self._is_decoding:
            self._is_decoding = True
            self._timeline.mark("decode_started")
            self._reservation.confirm()
        self._accept(output)

    def on_failed(self, error: MeshError) -> None:
        placement = self.placement
        sender = placement.prefill if isinstance(error, TransferCorrupt | TransferFailed) else None
        self._end(error, sender or placement.decode)

    def _on_abandoned(self, worker: WorkerInfo) -> None:
        """A worker has stalled, and other workers can take over."""
        self._end(WorkerLost(f"worker {worker.worker_id} has stalled"), worker)

    def _accept(self, output: SequenceOutput) -> None:
        self._last_event_s = self._clock()
        try:
            if self._request.attempt == 0 and output.cached_tokens:
                self._choice.note_cached(output.cached_tokens)
            self._choice.accept(output)
        except Exception as error:  # must end this request only, not the link that carries all of them
            self._end(error, None)
            return
        self._reservation.grow(self._choice.num_tokens)
        if self._choice.token_ids:
            self._timeline.tokens_received(self._last_event_s)
            self._reservation.first_token()
        if self._choice.finish_reason is not None:
            self._choice.timing = self._timeline.timing()
            self._end(None, None)

    def _end(self, error: Exception | None, blamed: WorkerInfo | None) -> None:
        """End the attempt. Only the first call counts."""
        if not self._ended.done():
            self.blamed = blamed
            self._ended.set_result(error)
        if not self._reserved.done():
            self._reserved.set_result(None)

    async def _wait_reserved(self) -> int | None:
        """Return how many leading tokens the decode worker has cached, or None if the attempt has ended."""
        try:
            async with asyncio.timeout(self._timeouts.reserve_s):
                return await self._reserved
        except TimeoutError:
            self._end(WorkerLost("the decode worker reserved no memory in time"), self.placement.decode)
            return None

    async def _wait_ended(self) -> None:
        """Return when the attempt has ended; raise its error.

        One timer serves many tokens: it checks the age of the last event.
        """
        while not self._ended.done():
            is_decoding = self._is_decoding or self._is_transferred
            timeout_s = self._timeouts.stall_s if is_decoding else self._timeouts.prefill_s
            waited_s = self._clock() - self._last_event_s
            if waited_s >= timeout_s and not self._prefill_runs():
                self._end(WorkerLost(f"no token for {waited_s:.1f} s"), self.placement.decode)
                break
            next_check_s = min(max(timeout_s - waited_s, self._timeouts.stall_s / 4), self._timeouts.stall_s)
            await asyncio.wait({self._ended}, timeout=next_check_s)
        error = self._ended.result()
        if error is not None:
            raise error

    def _prefill_runs(self) -> bool:
        """True while the prefill call runs: the call has a deadline of its own."""
        return self._prefill_call is not None and not self._prefill_call.done()

    def _start_prefill(self, worker: WorkerInfo, destination: KVDestination) -> None:
        self._prefill_call = asyncio.get_running_loop().create_task(self._run_prefill(worker, destination))
        self._prefill_call.add_done_callback(self._prefill_ended)

    async def _run_prefill(self, worker: WorkerInfo, destination: KVDestination) -> None:
        async with aclosing(self._prefill_client.run(worker, self._request, destination)) as events:
            async for event in events:
                self._on_prefill(event)

    def _on_prefill(self, event: PrefillEvent) -> None:
        if isinstance(event, SequenceOutput):
            if (event.request_id, event.attempt) != (self._request.request_id, self._request.attempt):
                return
            if event.tokens:  # events without tokens carry log-probs of the prompt
                self._has_first_token = True
                self._timeline.mark("prefill_finished")
                self._reservation.prefill_computed()
            self._accept(event)
        elif isinstance(event, PrefillStarted):
            self._timeline.mark("prefill_started", ago_s=event.elapsed_s)
            self._timeline.mark("transfer_started")  # KV is sent while the prompt is computed
            self._reservation.transfer_started()
        else:
            self._is_transferred = True
            self._timeline.mark("transfer_finished")
            self._timeline.note_kv_transfer(event.duration_s)
            self._last_event_s = self._clock()
            self._reservation.transfer_finished(event.num_bytes)

    def _prefill_ended(self, task: "asyncio.Task[None]") -> None:
        """A prefill that fails after the decode worker has all KV does no harm."""
        if task.cancelled():
            return
        error = task.exception()
        self._reservation.prefill_released()
        if self._has_first_token and (error is None or self._is_transferred or self._is_decoding):
            return
        if not isinstance(error, Exception):
            error = TransferFailed("the prefill ended without a first token")
        self._end(error, self.placement.decode if isinstance(error, ReceiverLost) else self.placement.prefill)

    def close(self) -> None:
        """Abort on both workers and release the reservation.

        `run` calls this; callers only need it if `run` never ran.
        """
        self._link.abort((self._request.request_id, self._request.attempt))
        if self._prefill_call is not None:
            self._prefill_call.cancel()
        self._reservation.release()
        self._end(None, None)
