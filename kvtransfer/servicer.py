"""The KvTransfer gRPC service. It only translates; KVReceiver has the logic."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from kvtransfer.messages import SERVICE_NAME, reply_to_proto, requests_from_bytes
from kvtransfer.receiver import KVReceiver
from mesh.v1 import kvtransfer_pb2 as pb


class KvTransferServicer:
    """Serves `Push` on a decode worker. Requests are parsed here, because generated code would copy every payload."""

    def __init__(self, receiver: KVReceiver) -> None:
        self._receiver = receiver

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to `server`. Replaces the generated `add_KvTransferServicer_to_server`."""
        serializer = pb.PushResponse.SerializeToString
        push = grpc.stream_stream_rpc_method_handler(self.push, lambda raw: raw, serializer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, {"Push": push}),))

    async def push(
        self, raw_requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.PushResponse]:
        async with aclosing(self._receiver.push(requests_from_bytes(raw_requests))) as replies:
            async for reply in replies:
                yield reply_to_proto(reply)
