"""A sender of KV that says exactly what a test wants, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc

from kvtransfer import ExpectedTransfer
from kvtransfer.messages import SenderMessage, request_to_bytes
from mesh.rpc.channel import open_channel
from mesh.rpc.credentials import MeshKey
from mesh.v1 import kvtransfer_pb2 as pb
from mesh.v1 import kvtransfer_pb2_grpc as pb_grpc
from tests.fakes.kv_store import box
from tests.fakes.runner import FAKE_LAYOUT, FakeKVStore, fake_token
from tests.fakes.transfers import make_chunk, make_commit, open_message
from tests.service.worker_rig import INCARNATION


class RawSender:
    """One Push call. It sends nothing by itself: no renewals."""

    def __init__(self, channel: grpc.aio.Channel, key: MeshKey) -> None:
        self._call = pb_grpc.KvTransferStub(channel).Push(metadata=key.metadata())

    async def say(self, message: SenderMessage) -> str:
        """Send a message and wait for its answer; which one it is, or "" if the call has ended instead."""
        try:
            await self._call.write(pb.PushRequest.FromString(request_to_bytes(message)))
            reply = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return ""
        return reply.WhichOneof("message") if isinstance(reply, pb.PushResponse) else ""

    async def say_all(self, messages: Sequence[SenderMessage]) -> grpc.StatusCode:
        """Say one after another until the call ends; how it ended."""
        for message in messages:
            if not await self.say(message):
                break
        return await self.status()

    async def status(self) -> grpc.StatusCode:
        """How the call has ended, once it has; if it waits for more, nothing more comes."""
        await self._call.done_writing()
        return await self._call.code()

    async def refused(self) -> grpc.StatusCode:
        """What the receiver ends the call with while this side is silent, but there."""
        return await self._call.code()


@asynccontextmanager
async def raw_sender(address: str, key: MeshKey) -> AsyncIterator[RawSender]:
    async with open_channel(address, own_connection=True) as channel:
        sender = RawSender(channel, key)
        yield sender
        sender._call.cancel()


def honest_messages(prompt: Sequence[int], transfer_id: str, attempt: int = 0) -> list[SenderMessage]:
    """What a prefill worker with a FakeRunner says to the decode worker of a WorkerRig: one chunk for each layer."""
    layout = FAKE_LAYOUT
    num_blocks = layout.num_blocks_for(len(prompt))
    store = FakeKVStore(num_blocks)
    for position, token_id in enumerate(prompt):
        store.data[:, :, position // layout.block_size, position % layout.block_size] = token_id
    block_ids = tuple(range(num_blocks))
    reservation = ExpectedTransfer(transfer_id, attempt, block_ids, 0, len(prompt))
    places = [box(0, num_blocks, layer, 1, layout.whole.heads) for layer in range(layout.num_layers)]
    chunks = [make_chunk(store, reservation, block_ids, number, place) for number, place in enumerate(places)]
    opening = replace(open_message(store, reservation), receiver_incarnation=INCARNATION)
    commit = replace(make_commit(reservation, chunks), first_token_id=fake_token(prompt))
    return [opening, *chunks, commit]
