"""The status of a Push call is the receiver's, whatever the sender is writing when the call ends."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvtransfer.push_call import PushCall
from mesh.domain.errors import MeshError, TransferCorrupt
from mesh.rpc.channel import open_channel
from mesh.v1 import kvtransfer_pb2 as pb
from mesh.v1 import kvtransfer_pb2_grpc
from tests.service.transfer_pair import KEY, serving

NUM_CALLS = 200


class Refusing(kvtransfer_pb2_grpc.KvTransferServicer):
    """Refuses each call after some messages, in turn 1 to 5."""

    def __init__(self) -> None:
        self._num_calls = 0

    async def Push(self, messages: AsyncIterator[pb.PushRequest], _: object) -> AsyncIterator[pb.PushResponse]:
        self._num_calls += 1
        for _ in range(1 + self._num_calls % 5):
            await anext(messages)
        raise TransferCorrupt(f"call {self._num_calls} is corrupt")
        yield


async def write_until_refused(call: PushCall, message: bytes) -> MeshError:
    while True:
        try:
            await call.write(message)
        except MeshError as error:
            return error


async def read_until_refused(call: PushCall) -> MeshError:
    with pytest.raises(MeshError) as refused:
        await call.read()
    return refused.value


@pytest.mark.parametrize("num_bytes", [100, 70_000, 1 << 20])
async def test_a_refusal_reaches_a_sender_that_is_writing(num_bytes: int) -> None:
    message = pb.PushRequest(chunk=pb.TransferChunk(payload=bytes(num_bytes))).SerializeToString()
    async with serving(Refusing()) as server, open_channel(server.address, own_connection=True) as channel:
        for number in range(1, NUM_CALLS + 1):
            call = PushCall(channel, KEY.metadata())
            errors = await asyncio.gather(read_until_refused(call), write_until_refused(call, message))
            later = await write_until_refused(call, message), await read_until_refused(call)
            call.cancel()
            expected = (TransferCorrupt, f"call {number} is corrupt")
            assert {(type(error), str(error)) for error in (*errors, *later)} == {expected}


async def test_a_call_that_cannot_connect_has_its_status_too() -> None:
    async with open_channel("127.0.0.1:1", own_connection=True) as channel:
        call = PushCall(channel, KEY.metadata())
        assert "refused" in str(await write_until_refused(call, b""))
        assert "refused" in str(await read_until_refused(call))


async def test_a_write_to_a_cancelled_call_is_an_error() -> None:
    async with serving(Refusing()) as server, open_channel(server.address, own_connection=True) as channel:
        call = PushCall(channel, KEY.metadata())
        call.cancel()
        assert "cancelled" in str(await write_until_refused(call, b""))
