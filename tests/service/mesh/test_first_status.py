"""The status that a caller reads is the server's, whatever the caller is writing when the server ends the call."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import grpc

from mesh.rpc.channel import open_channel
from mesh.rpc.status import FirstStatus
from mesh.v1 import worker_pb2, worker_pb2_grpc

NUM_CALLS, AT_ONCE = 1_000, 10
LATEST_S = 0.01
"""The latest moment of a write: some come before the end of their call, some after it, and some meet it."""


class Refusing(worker_pb2_grpc.RegistryServicer):
    async def Register(
        self, messages: AsyncIterator[worker_pb2.RegisterRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.RegisterResponse]:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the key is wrong")
        yield worker_pb2.RegisterResponse()


async def status_of_call(stub: worker_pb2_grpc.RegistryStub, delay_s: float) -> grpc.aio.AioRpcError:
    call = stub.Register()
    status = FirstStatus(call)
    await asyncio.sleep(delay_s)
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        await call.write(worker_pb2.RegisterRequest())
    return await status.wait()


async def test_a_refusal_is_not_replaced_by_the_failure_of_a_write() -> None:
    server = grpc.aio.server()
    worker_pb2_grpc.add_RegistryServicer_to_server(Refusing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    moments = random.Random(0)
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            stub = worker_pb2_grpc.RegistryStub(channel)
            for _ in range(NUM_CALLS // AT_ONCE):
                calls = [status_of_call(stub, LATEST_S * moments.random()) for _ in range(AT_ONCE)]
                for status in await asyncio.gather(*calls):
                    assert (status.code(), status.details()) == (grpc.StatusCode.UNAUTHENTICATED, "the key is wrong")
    finally:
        await server.stop(0)
