"""The Prefill gRPC service. It only translates; PrefillService has the logic."""

import contextlib
from collections.abc import AsyncIterator, Iterator

import grpc

from mesh import wire
from mesh.domain.prefill import KVDestination, PrefillEvent, PrefillStarted
from mesh.domain.tokens import SequenceOutput
from mesh.v1 import prefill_pb2, prefill_pb2_grpc
from prefill_worker.service import PrefillService


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, service: PrefillService) -> None:
        self._service = service

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        events = self._service.prefill(wire.spec_from_proto(request.sequence), _destination(request.destination))
        async with contextlib.aclosing(events):
            async for event in events:
                for message in _messages(event):
                    yield message


def _destination(message: prefill_pb2.KvDestination) -> KVDestination:
    return KVDestination(
        message.address,
        message.worker_id,
        message.incarnation,
        message.transfer_id,
        message.ready_tokens,
        wire.kv_endpoints_from_proto(message.ranks),
    )


def _messages(event: PrefillEvent) -> Iterator[prefill_pb2.PrefillResponse]:
    """Yield one message, or several if a long prompt has many log-probs."""
    if isinstance(event, SequenceOutput):
        for part in event.in_parts():
            yield prefill_pb2.PrefillResponse(first_token=wire.output_to_proto(part))
    elif isinstance(event, PrefillStarted):
        yield prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted(elapsed_ms=1000 * event.elapsed_s))
    else:
        finished = prefill_pb2.TransferFinished(bytes=event.num_bytes, duration_ms=1000 * event.duration_s)
        yield prefill_pb2.PrefillResponse(finished=finished)
