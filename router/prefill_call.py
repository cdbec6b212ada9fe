"""One prefill: a call to a prefill worker, for as long as it computes the prompt and sends its KV."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import grpc
import structlog

from mesh import wire
from mesh.domain.errors import DeadlineExceeded, InvalidRequest, MeshError, Replayable, TransferFailed, WorkerLost
from mesh.domain.request import Request
from mesh.domain.tokens import StepOutput
from mesh.domain.worker import WorkerInfo
from mesh.registry.membership import Registry
from mesh.rpc.status import ERROR_KEY
from router.channels import Caller, Channels, responses_of
from tandem.v1 import prefill_pb2, prefill_pb2_grpc

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """The prompt's first pass began `elapsed_s` ago; KV of its first layers is there by now."""

    elapsed_s: float


@dataclass(frozen=True, slots=True)
class TransferFinished:
    """The decode worker has all KV. `duration_s`: since the transfer was opened, if the worker says so."""

    num_bytes: int
    duration_s: float | None


PrefillEvent = PrefillStarted | StepOutput | TransferFinished


@dataclass(frozen=True, slots=True)
class Reservation:
    """Where a prompt's KV goes: blocks a decode worker holds under `transfer_id`."""

    decode: WorkerInfo
    transfer_id: str
    ready_tokens: int


class PrefillClient:
    """Calls prefill workers."""

    def __init__(self, registry: Registry, channels: Channels, caller: Caller, *, timeout_s: float) -> None:
        self._registry = registry
        self._channels = channels
        self._caller = caller
        self._timeout_s = timeout_s

    async def run(
        self, worker: WorkerInfo, request: Request, reservation: Reservation
    ) -> AsyncGenerator[PrefillEvent, None]:
        """Events of one prefill. Leaving early cancels it. Raises Replayable, or InvalidRequest, or DeadlineExceeded if
        the request's own time is up.
        """
        stub = prefill_pb2_grpc.PrefillStub(self._channels.get(worker))
        time_left_s = self._timeout_s if request.time_left_s is None else request.time_left_s
        call = stub.Prefill(
            _message(request, reservation),
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
            raise self._judge(worker, error) from error
        except MeshError as error:
            raise self._judge(worker, error) from error

    def _judge(self, worker: WorkerInfo, error: MeshError) -> MeshError:
        """What the failed call means for the request."""
        if _is_unreachable(error):
            self._registry.lose(worker.worker_id, worker.incarnation)
            return error
        if isinstance(error, Replayable | InvalidRequest) and type(error) is not WorkerLost:
            return error
        # A worker's complaint about its peer, its settings or the time is not the client's: replay.
        log.warning("prefill failed", worker=worker.worker_id, error=str(error), kind=type(error).__name__)
        return TransferFailed(f"the prefill worker ended the call: {error}")


def _is_unreachable(error: MeshError) -> bool:
    """True if the connection failed, or was closed because the worker is lost; a worker's own complaint carries its
    error's name.
    """
    cause = error.__cause__
    if not isinstance(cause, grpc.aio.AioRpcError):
        return isinstance(error, WorkerLost)
    if cause.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    return ERROR_KEY not in dict(cause.trailing_metadata() or ())


def _message(request: Request, reservation: Reservation) -> prefill_pb2.PrefillRequest:
    destination = prefill_pb2.KvDestination(
        address=reservation.decode.address,
        worker_id=reservation.decode.worker_id,
        incarnation=reservation.decode.incarnation,
        transfer_id=reservation.transfer_id,
        ready_tokens=reservation.ready_tokens,
    )
    return prefill_pb2.PrefillRequest(sequence=wire.request_to_proto(request), destination=destination)


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
