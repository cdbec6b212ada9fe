"""The Decode gRPC service. It only translates; DecodeService has the logic."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from decode_worker.service import DecodeService
from decode_worker.session import Event, Failed, Reserved, Session
from mesh import wire
from mesh.domain.errors import InvalidRequest, WorkerLost
from mesh.domain.tokens import SequenceFailure
from mesh.v1 import decode_pb2, decode_pb2_grpc


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Serves `Attach`: a stream of commands from one router, and a stream of events back."""

    def __init__(self, service: DecodeService, incarnation: str) -> None:
        self._service = service
        self._incarnation = incarnation

    async def Attach(
        self, request_iterator: AsyncIterator[decode_pb2.AttachRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.AttachResponse]:
        session = await self._welcome(request_iterator)
        yield decode_pb2.AttachResponse(welcome=decode_pb2.AttachWelcome(worker_incarnation=self._incarnation))
        commands = asyncio.create_task(self._follow(session, request_iterator))
        commands.add_done_callback(lambda _: session.end())
        try:
            async for event in session.events():
                yield event_to_proto(event)
            if commands.done():
                commands.result()  # a command that cannot be read, or an error of ours, is no end in order
            yield decode_pb2.AttachResponse(ended=decode_pb2.AttachEnded())
            await commands  # the router ends them when it has read everything
        finally:
            session.all_read.set()
            commands.cancel()
            self._service.end_session(session)

    async def _welcome(self, requests: AsyncIterator[decode_pb2.AttachRequest]) -> Session:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("command") != "hello":
            raise InvalidRequest("the first command must be hello")
        if first.hello.worker_incarnation != self._incarnation:
            raise WorkerLost("this worker has restarted")
        return Session()

    async def _follow(self, session: Session, requests: AsyncIterator[decode_pb2.AttachRequest]) -> None:
        async for request in requests:
            if request.WhichOneof("command") == "start":
                self._start(session, request.start)
            elif request.WhichOneof("command") == "abort":
                self._service.abort(session, (request.abort.request_id, request.abort.attempt))

    def _start(self, session: Session, start: decode_pb2.StartSequence) -> None:
        try:
            spec = wire.spec_from_proto(start.sequence)
        except InvalidRequest as error:  # fail this sequence only; other sequences share the stream
            keys = [(fork.request_id, fork.attempt) for fork in start.sequence.forks]
            for key in ((start.sequence.request_id, start.sequence.attempt), *keys):
                session.send(Failed(key, SequenceFailure.REFUSED, str(error)))
            return
        self._service.start(session, spec, start.transfer_id)


def event_to_proto(event: Event) -> decode_pb2.AttachResponse:
    if isinstance(event, Reserved):
        request_id, attempt = event.key
        return decode_pb2.AttachResponse(
            reserved=decode_pb2.SequenceReserved(
                request_id=request_id, attempt=attempt, ready_tokens=event.ready_tokens
            )
        )
    if isinstance(event, Failed):
        request_id, attempt = event.key
        return decode_pb2.AttachResponse(
            failed=decode_pb2.SequenceFailed(
                request_id=request_id,
                attempt=attempt,
                reason=wire.failure_to_proto(event.reason),
                detail=event.detail,
            )
        )
    response = decode_pb2.AttachResponse()
    messages = response.step.outputs
    for output in event.outputs:
        wire.write_output(output, messages.add())
    return response
