"""The call to a prefill worker, over the channel to this run of the worker (connections.py). It lasts while the worker
computes the prompt and sends its KV. Its twin for decode workers is decode_link.py.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
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
    Replayable,
    TransferFailed,
    WorkerLost,
)
from mesh.domain.prefill import KVDestination, PrefillEvent, PrefillStarted, TransferFinished
from mesh.domain.request import SequenceSpec
from mesh.domain.worker import WorkerInfo
from mesh.rpc.status import ERROR_KEY
from mesh.v1 import prefill_pb2, prefill_pb2_grpc
from router.workers.connections import Channels, RouterIdentity, responses_of
from router.workers.membership import Membership

log = structlog.get_logger(__name__)


class PrefillCaller(Protocol):
    """Calls prefill workers. Plug point: PrefillClient, and modelled workers
    (tandem_cli/simulation/workers.py)."""

    def run(
        self, worker: WorkerInfo, spec: SequenceSpec, destination: KVDestination
    ) -> AsyncGenerator[PrefillEvent, None]:
        """Yield the events of one prefill. Closing the generator cancels it.

        Raises Replayable, InvalidRequest, ModelFailed, or DeadlineExceeded if the request's own deadline has passed.
        """
        ...


class PrefillClient:
    """Calls prefill workers; a call fails after `timeout_s`."""

    def __init__(
        self, membership: Membership, channels: Channels, identity: RouterIdentity, *, timeout_s: float
    ) -> None:
        self._membership = membership
        self._channels = channels
        self._identity = identity
        self._timeout_s = timeout_s

    async def run(
        self, worker: WorkerInfo, spec: SequenceSpec, destination: KVDestination
    ) -> AsyncGenerator[PrefillEvent, None]:
        stub = prefill_pb2_grpc.PrefillStub(self._channels.get(worker))
        time_left_s = self._timeout_s if spec.time_left_s is None else spec.time_left_s
        call = stub.Prefill(
            _message(spec, destination),
            timeout=min(self._timeout_s, time_left_s),
            metadata=self._identity.metadata,
        )
        try:
            async with aclosing(responses_of(call)) as responses:
                async for response in responses:
                    event = _event(response)
                    if event is not None:
                        yield event
        except DeadlineExceeded as error:
            if spec.time_left_s is not None and spec.time_left_s <= self._timeout_s:
                raise
            raise self._error_for_request(worker, error) from error
        except MeshError as error:
            raise self._error_for_request(worker, error) from error

    def _error_for_request(self, worker: WorkerInfo, error: MeshError) -> MeshError:
        """Return the error that the failed call means for the request."""
        status = _status_of_grpc(error)
        if status is grpc.StatusCode.RESOURCE_EXHAUSTED:  # which it would be for any worker
            return AttemptsFailed(f"a message about the prompt is too large: {error}")
        if isinstance(error, WorkerLost):
            is_closed = not isinstance(error.__cause__, grpc.aio.AioRpcError)  # the channel, or by the worker
            if is_closed or status is grpc.StatusCode.UNAVAILABLE:
                self._membership.lose(worker)
                return error
        elif isinstance(error, Replayable | InvalidRequest | ModelFailed):
            return error
        log.warning("prefill failed", worker=worker.worker_id, error=str(error), kind=type(error).__name__)
        if isinstance(error, WorkerLost):  # an internal error of the worker
            return error
        # An error about settings or the timeout may be due to either end, and is not the client's fault: replay.
        return TransferFailed(f"the prefill worker ended the call: {error}")


def _status_of_grpc(error: MeshError) -> grpc.StatusCode | None:
    """The status with which gRPC itself has ended the call. None for an error that the worker has raised: it carries
    its name in the metadata.
    """
    cause = error.__cause__
    if not isinstance(cause, grpc.aio.AioRpcError) or ERROR_KEY in dict(cause.trailing_metadata() or ()):
        return None
    return cause.code()


def _message(spec: SequenceSpec, destination: KVDestination) -> prefill_pb2.PrefillRequest:
    message = prefill_pb2.KvDestination(
        address=destination.address,
        worker_id=destination.worker_id,
        incarnation=destination.incarnation,
        transfer_id=destination.transfer_id,
        ready_tokens=destination.ready_tokens,
        ranks=wire.kv_endpoints_to_proto(destination.kv_endpoints),
    )
    return prefill_pb2.PrefillRequest(sequence=wire.spec_to_proto(spec), destination=message)


def _event(response: prefill_pb2.PrefillResponse) -> PrefillEvent | None:
    kind = response.WhichOneof("event")
    if kind == "first_token":
        return wire.output_from_proto(response.first_token)
    if kind == "started":
        return PrefillStarted(response.started.elapsed_ms / 1000)
    if kind == "finished":
        return TransferFinished(response.finished.bytes, response.finished.duration_ms / 1000)
    return None
