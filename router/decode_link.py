"""The router's one stream to one run of a decode worker: commands down, tokens of all its sequences up.

    hello ─▶ welcome ─▶ start/abort ... ◀─ reserved, step outputs, failed ... ─▶ broken: every attempt on it has failed

One reader hands messages to the attempts they are for, by a plain call: no task, timer or queue per token. Messages of
attempts that are over find nobody and are dropped. The stream has no deadline, it lives as long as the worker;
keepalive and the registry's heartbeats tell when that is over.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import grpc

from mesh import wire
from mesh.domain.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MeshError,
    SequencePreempted,
    TransferCorrupt,
    TransferFailed,
    WorkerBusy,
    WorkerDraining,
    WorkerLost,
)
from mesh.domain.request import Request
from mesh.domain.tokens import SequenceFailure, StepOutput
from mesh.domain.worker import WorkerInfo
from router.channels import Caller, responses_of
from tandem.v1 import decode_pb2, decode_pb2_grpc

_WELCOME_TIMEOUT_S = 5.0

SequenceKey = tuple[str, int]

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
    """Where a link delivers what happens to one attempt. Called on the event loop; must not block."""

    def on_reserved(self, ready_tokens: int) -> None:
        """Blocks are held; this many leading tokens are there already."""
        ...

    def on_output(self, output: StepOutput) -> None:
        """New tokens."""
        ...

    def on_failed(self, error: MeshError) -> None:
        """The worker has given the attempt up, or is lost. Nothing follows."""
        ...


class DecodeLink:
    """Run it once; it is over when `run` returns."""

    def __init__(self, info: WorkerInfo, channel: grpc.aio.Channel, caller: Caller) -> None:
        self.info = info
        self.is_up = False
        self._stub = decode_pb2_grpc.DecodeStub(channel)
        self._caller = caller
        self._listeners: dict[SequenceKey, SequenceListener] = {}
        self._commands: asyncio.Queue[decode_pb2.AttachRequest] = asyncio.Queue()

    async def run(self, on_up: Callable[[], None]) -> None:
        """Attach, and deliver until the stream breaks. Raises what it broke with; cancel to close."""
        call = self._stub.Attach(self._outgoing(), metadata=self._caller.metadata)
        responses = responses_of(call)
        try:
            await self._be_welcomed(responses)
            self.is_up = True
            on_up()
            async for response in responses:
                self._deliver(response)
            raise WorkerLost("the worker has ended the stream")
        finally:
            self.is_up = False
            await responses.aclose()
            self._fail_all(WorkerLost("the decode worker is lost"))

    def start(
        self,
        request: Request,
        transfer_id: str,
        listener: SequenceListener,
        fork_listeners: Sequence[SequenceListener] = (),
    ) -> None:
        """Start an attempt and its forks; each listener hears of its own until it fails, finishes, or is aborted."""
        self._listeners[request.request_id, request.attempt] = listener
        for fork, fork_listener in zip(request.forks, fork_listeners, strict=True):
            self._listeners[fork.request_id, fork.attempt] = fork_listener
        start = decode_pb2.StartSequence(sequence=wire.request_to_proto(request), transfer_id=transfer_id)
        self._commands.put_nowait(decode_pb2.AttachRequest(start=start))

    def abort(self, key: SequenceKey) -> None:
        """End an attempt, if the worker has not ended it itself. Its listener hears nothing more."""
        if self._listeners.pop(key, None) is not None and self.is_up:
            abort = decode_pb2.AbortSequence(request_id=key[0], attempt=key[1])
            self._commands.put_nowait(decode_pb2.AttachRequest(abort=abort))

    async def _outgoing(self) -> AsyncIterator[decode_pb2.AttachRequest]:
        hello = decode_pb2.AttachHello(router_id=self._caller.router_id, worker_incarnation=self.info.incarnation)
        yield decode_pb2.AttachRequest(hello=hello)
        while True:
            yield await self._commands.get()

    async def _be_welcomed(self, responses: AsyncIterator[decode_pb2.AttachResponse]) -> None:
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

    def _deliver_output(self, output: StepOutput) -> None:
        key = (output.request_id, output.attempt)
        listener = self._listeners.get(key)
        if listener is None:
            return
        if output.finish_reason is not None:
            del self._listeners[key]
        listener.on_output(output)

    def _fail_all(self, error: MeshError) -> None:
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.on_failed(error)


def _error_of(failed: decode_pb2.SequenceFailed) -> MeshError:
    reason = wire.failure_from_proto(failed.reason)
    if reason is SequenceFailure.TOO_LARGE:
        return InvalidRequest("prompt and max_new_tokens together are longer than a decode worker can hold")
    if reason is SequenceFailure.REFUSED:
        return InvalidRequest(failed.detail)
    return _ERRORS[reason](f"the decode worker gave the sequence up: {reason.value}: {failed.detail}")
