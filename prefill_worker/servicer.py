"""The Prefill service: translation only."""

import contextlib
from collections.abc import AsyncIterator

import grpc

from mesh import wire
from prefill_worker.service import Destination, FirstToken, PrefillEvent, PrefillService, Started
from tandem.v1 import prefill_pb2, prefill_pb2_grpc


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """One prompt per call."""

    def __init__(self, service: PrefillService) -> None:
        self._service = service

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Run a prompt; its events as they come."""
        events = self._service.prefill(wire.request_from_proto(request.sequence), _destination(request.destination))
        async with contextlib.aclosing(events):
            async for event in events:
                yield _event_to_proto(event)


def _destination(message: prefill_pb2.KvDestination) -> Destination:
    return Destination(
        message.address, message.worker_id, message.incarnation, message.transfer_id, message.ready_tokens
    )


def _event_to_proto(event: PrefillEvent) -> prefill_pb2.PrefillResponse:
    if isinstance(event, Started):
        return prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted(elapsed_ms=1000 * event.elapsed_s))
    if isinstance(event, FirstToken):
        return prefill_pb2.PrefillResponse(first_token=wire.output_to_proto(event.output))
    finished = prefill_pb2.TransferFinished(
        bytes=event.num_bytes, transport=event.transport, duration_ms=1000 * event.duration_s
    )
    return prefill_pb2.PrefillResponse(finished=finished)
