"""Just enough of a router to drive the workers of a WorkerRig."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from mesh import wire
from mesh.domain.request import SequenceSpec, mint_id
from mesh.rpc.channel import open_channel
from mesh.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.service.worker_rig import INCARNATION, MESH_KEY, WorkerRig
from tests.waiting import LIMIT_S


class Inbox(asyncio.Queue[decode_pb2.AttachResponse]):
    """What the decode worker has said about one request."""

    async def get(self) -> decode_pb2.AttachResponse:
        """The next message. TimeoutError if none comes."""
        try:
            async with asyncio.timeout(LIMIT_S):
                return await super().get()
        except TimeoutError:
            raise TimeoutError(f"the decode worker has said nothing more within {LIMIT_S:g} s") from None


class FakeRouter:
    """Attaches, starts, prefills, collects tokens by request. With `ends_commands`, as routers do once they have read
    all that a worker has to say.
    """

    def __init__(
        self, rig: WorkerRig, attach: grpc.aio.StreamStreamCall, prefill: prefill_pb2_grpc.PrefillStub
    ) -> None:
        self.rig = rig
        self.attach = attach
        self.prefill_stub = prefill
        self.incarnation = INCARNATION
        self.ends_commands = True
        self.writing = asyncio.Lock()  # gRPC takes one write at a time
        self.inbox: dict[str, Inbox] = {}

    async def read_forever(self) -> None:
        while (message := await self.attach.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("event")
            if kind == "step":
                for output in message.step.outputs:
                    one = decode_pb2.AttachResponse(step=decode_pb2.StepOutputs(outputs=[output]))
                    self.box(output.request_id).put_nowait(one)
            elif kind == "ended":
                if self.ends_commands:
                    await self.attach.done_writing()
            else:
                self.box(getattr(message, kind).request_id).put_nowait(message)

    def box(self, request_id: str) -> Inbox:
        return self.inbox.setdefault(request_id, Inbox())

    async def start(self, spec: SequenceSpec, transfer_id: str = "") -> None:
        start = decode_pb2.StartSequence(sequence=wire.spec_to_proto(spec), transfer_id=transfer_id)
        async with self.writing:
            await self.attach.write(decode_pb2.AttachRequest(start=start))

    async def abort(self, spec: SequenceSpec) -> None:
        abort = decode_pb2.AbortSequence(request_id=spec.request_id, attempt=spec.attempt)
        async with self.writing:
            await self.attach.write(decode_pb2.AttachRequest(abort=abort))

    def prefill(
        self, spec: SequenceSpec, transfer_id: str, ready_tokens: int, timeout_s: float = 60
    ) -> grpc.aio.UnaryStreamCall:
        destination = prefill_pb2.KvDestination(
            address=self.rig.decode_address,
            worker_id="decode-0",
            incarnation=self.incarnation,
            transfer_id=transfer_id,
            ready_tokens=ready_tokens,
        )
        message = prefill_pb2.PrefillRequest(sequence=wire.spec_to_proto(spec), destination=destination)
        return self.prefill_stub.Prefill(message, metadata=MESH_KEY.metadata(), timeout=timeout_s)

    async def run(self, spec: SequenceSpec) -> list[int]:
        """The whole way through both workers; generated token ids."""
        transfer_id = mint_id()
        await self.start(spec, transfer_id)
        reserved = (await self.box(spec.request_id).get()).reserved
        ids: list[int] = []
        async for message in self.prefill(spec, transfer_id, reserved.ready_tokens):
            if message.HasField("first_token"):
                ids += [token.id for token in message.first_token.tokens]
                if message.first_token.finish_reason:
                    await self.abort(spec)
                    return ids
        return ids + await self.collect(spec)

    async def collect(self, spec: SequenceSpec) -> list[int]:
        """Tokens from the decode worker until it finishes the sequence."""
        ids: list[int] = []
        while True:
            message = await self.box(spec.request_id).get()
            assert message.HasField("step"), message
            output = message.step.outputs[0]
            ids += [token.id for token in output.tokens]
            if output.finish_reason:
                return ids

    async def failure(self, request_id: str) -> decode_pb2.SequenceFailed:
        """What the decode worker says at the end of a sequence that it gives up."""
        async with asyncio.timeout(LIMIT_S):
            while not (message := await self.box(request_id).get()).HasField("failed"):
                pass
        return message.failed


@asynccontextmanager
async def fake_router(rig: WorkerRig) -> AsyncIterator[FakeRouter]:
    async with (
        open_channel(rig.decode_address, rig.tls) as decode,
        open_channel(rig.prefill_address, rig.tls) as prefill,
    ):
        attach = decode_pb2_grpc.DecodeStub(decode).Attach(metadata=MESH_KEY.metadata())
        hello = decode_pb2.AttachHello(router_id="router", worker_incarnation=INCARNATION)
        await attach.write(decode_pb2.AttachRequest(hello=hello))
        welcome = await attach.read()
        assert welcome.welcome.worker_incarnation == INCARNATION
        router = FakeRouter(rig, attach, prefill_pb2_grpc.PrefillStub(prefill))
        reader = asyncio.create_task(router.read_forever())
        yield router
        reader.cancel()
        attach.cancel()
